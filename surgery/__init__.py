"""Model surgery: cut Hugging Face models into components, build and join blocks, ingest and export."""
