"""Packed objects: tensors stored as compressed differences from another tensor, under the digest of their plain bytes.

    root/packed/ab/abcd…   represents objects/ab/abcd… once that is removed; while both exist, the plain one is read

Modules:
    layout.py    format of a packed file
    planes.py    the arithmetic
    plan.py      choice of what to pack against what
    reader.py    decoding and verification of packed files
    writer.py    packing of one object
    pack.py      packing and unpacking of whole models

A packed object's base is always plain, so there is one level of decoding, and it is kept as long as the packed object
is (`zoo.upkeep.collect`). The rest of the store imports only `reader`.
"""
