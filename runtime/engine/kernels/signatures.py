"""The C functions and structures of the compiled kernels (`kernels.c`) as ctypes has them."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from typing import Any


class PartData(ctypes.Structure):
    """`struct part`: one packed weight of a product."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("n", c_int64), ("narrow", c_int64))


class PagesData(ctypes.Structure):
    """`struct pages`: K and V in pages."""

    _fields_ = (
        ("k", c_void_p), ("v", c_void_p), ("page_stride", c_int64), ("page_tokens", c_int64), ("tables", c_void_p),
        ("table_stride", c_int64), ("narrow", c_int64),
    )  # fmt: skip


#: Maximum heads of a layer and width of a head in the kernels' attention, which keeps them on a thread's stack.
MOST_HEADS, MOST_WIDTH = 1024, 1024

#: Maximum number of weights in a group with the same input that an adapter covers at once.
MOST_PARTS = 4


class LowData(ctypes.Structure):
    """`struct low`: one adapter on a group of weights."""

    _fields_ = (
        ("a", c_void_p), ("ranks", c_int64), ("b", c_void_p * MOST_PARTS), ("bias", c_void_p * MOST_PARTS),
        ("rank", c_int64 * MOST_PARTS),
    )  # fmt: skip


#: Maximum number of log-probabilities beside the chosen token's that the kernels find.
MOST_BEST = 64


class PenaltiesData(ctypes.Structure):
    """`struct penalties`: the penalties of one row."""

    _fields_ = (
        ("row", c_void_p), ("ids", c_void_p), ("counts", c_void_p), ("count", c_int64), ("repetition", c_float),
        ("frequency", c_float), ("presence", c_float),
    )  # fmt: skip


#: Arguments and, where it is not void, the result of each function.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "zoo_panel": (),
    "zoo_products": (),
    "zoo_multiply_add": (c_int64, c_int, c_int),
    "zoo_read": (c_void_p, c_int64, c_int),
    "zoo_pack": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int),
    "zoo_unpack": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "zoo_pack_narrow": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int),
    "zoo_unpack_narrow": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "zoo_coded_panel": (),
    "zoo_pack_coded": (c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int),
    "zoo_unpack_coded": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "zoo_round": (c_void_p, c_int64, c_int),
    "zoo_linear": (c_void_p, c_int64, c_int64, c_void_p, c_int, c_int, c_void_p, c_void_p, c_int),
    "zoo_stored": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int),
    "zoo_gate": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "zoo_adapt": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int),
    "zoo_norm": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int),
    "zoo_rotate": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int),
    "zoo_keep": (
        c_void_p,
        c_void_p,
        *[c_int64] * 4,
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_int64,
        c_int,
        c_int,
    ),
    "zoo_decode": (
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
        *[c_int64] * 4,
        c_void_p,
        c_int64,
        c_float,
        c_float,
        c_void_p,
        c_void_p,
        c_int,
    ),
    "zoo_chunks": (
        c_void_p,
        c_int64,
        c_void_p,
        *[c_int64] * 4,
        c_void_p,
        c_int64,
        c_float,
        c_float,
        c_void_p,
        c_void_p,
        c_int,
    ),
    "zoo_layers": (c_void_p, c_void_p, c_int64, c_void_p, c_int, c_int),
    "zoo_onward": (c_void_p,),
    "zoo_merge": (c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_void_p),
    "zoo_allow": (c_void_p, c_int64, c_int64, *[c_void_p] * 3, c_int),
    "zoo_argmax": (c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_int),
    "zoo_penalise": (c_void_p, c_int64, c_int64),
    "zoo_scored": (c_void_p, c_int64, c_int64, c_void_p, c_int64, *[c_void_p] * 3, c_int),
    "zoo_sampled": (c_void_p, c_int64, c_int64, *[c_void_p] * 9, c_int),
}
RETURNS: dict[str, Any] = {
    "zoo_panel": c_int64,
    "zoo_products": c_int64,
    "zoo_coded_panel": c_int64,
    "zoo_multiply_add": c_double,
    "zoo_read": c_int64,
    "zoo_linear": c_int,
    "zoo_stored": c_int,
    "zoo_decode": c_int,
    "zoo_chunks": c_int,
    "zoo_adapt": c_int,
    "zoo_sampled": c_int,
    "zoo_layers": c_int,
    "zoo_onward": c_int,
}


class Half(ctypes.Structure):
    """`struct half`: half a layer. Only `layer`, the adapters, `stops` and `away` change between calls."""

    _fields_ = (
        ("kind", c_int64),
        ("width", c_int64),
        ("norm", c_void_p),
        ("in_parts", c_void_p),
        ("out_parts", c_void_p),
        ("in_count", c_int64),
        ("in_total", c_int64),
        ("out_inputs", c_int64),
        ("in_sizes", c_void_p),
        ("out_sizes", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("layer", c_int64),
        ("in_lows", c_void_p),
        ("out_lows", c_void_p),
        ("eps", c_float),
        ("q_eps", c_float),
        ("k_eps", c_float),
        ("scale", c_float),
        ("narrow", c_int64),
        ("stops", c_int64),
        ("away", c_void_p),
    )


class StepData(ctypes.Structure):
    """`struct step`: what the rows of a step have in common."""

    _fields_ = (
        ("rows", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("k_pool", c_void_p),
        ("v_pool", c_void_p),
        ("page_stride", c_int64),
        ("page_tokens", c_int64),
        ("token_pages", c_void_p),
        ("token_offsets", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("layer_stride", c_int64),
        ("lengths", c_void_p),
        ("bounds", c_void_p),
        ("adapters", c_int64),
        ("normed", c_void_p),
        ("wide", c_void_p),
        ("made", c_void_p),
        ("narrow", c_int64),
        ("chunks", c_void_p),
        ("chunk_count", c_int64),
        ("singles", c_void_p),
        ("single_tables", c_void_p),
        ("single_count", c_int64),
    )


class OnwardData(ctypes.Structure):
    """`struct onward`: rows of one token each, and where the K, V and angles of their next tokens are."""

    _fields_ = (
        ("lengths", c_void_p),
        ("rows", c_int64),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("layer_stride", c_int64),
        ("layers", c_int64),
        ("groups", c_int64),
        ("page_tokens", c_int64),
        ("pages", c_void_p),
        ("offsets", c_void_p),
        ("cos_of", c_void_p),
        ("sin_of", c_void_p),
        ("positions", c_int64),
        ("dim", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
    )
