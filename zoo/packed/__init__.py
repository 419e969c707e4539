"""Packed objects: tensors kept as their difference from another tensor, in fewer bytes. A digest stays the digest
of the plain bytes.

    root/packed/ab/abcd…   stands for objects/ab/abcd… once that is gone; while both are there, the plain one is read

    layout.py   what a packed file looks like           planes.py   the arithmetic          plan.py   what is packed
                                                                    against what
    reader.py   packed files decoded and verified       writer.py   one object packed       pack.py   whole models, and
                                                                    back

A packed object's base is always plain, so one level of decoding is all there ever is, and it is kept as long as the
packed object is (`zoo.upkeep.collect`). Only `reader` is imported by the rest of the store.
"""
