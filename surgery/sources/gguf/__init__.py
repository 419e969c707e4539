"""GGUF files as sources: strict header, dequantised tensors, config and tokenizer from the metadata.

header.py      the file's first bytes: metadata and tensor table, every size checked before it is used
types.py       types of metadata values and of tensor blocks
models.py      architectures: config.json and the names of tensors
tensors.py     tensors dequantised in runs of bounded size, as transformers dequantises them
tokenizer.py   tokenizer files from the vocabulary in the metadata
source.py      all of it as a `surgery.sources.base.Source`
"""
