"""Cutting Hugging Face models into components, building and joining blocks, ingest and export."""
