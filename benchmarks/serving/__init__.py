"""One device and HTTP, beside other engines."""
