"""Content-addressed files: tensors, blobs, headers, locks."""
