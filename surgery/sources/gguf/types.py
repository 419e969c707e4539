"""Types in GGUF files: metadata values, and the blocks in which tensors are stored.

The sizes are those of ggml; a test compares them with the `gguf` package. Types that `gguf` cannot dequantise are
missing on purpose: a file with one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: struct codes of metadata values with a fixed size, by their number in the file. 8 is a string, 9 an array.
NUMBERS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor's elements are stored: in blocks of `elements` that take `nbytes` each.

    Fields:
        dtype: safetensors' name of the same elements; None for quantised blocks.
    """

    name: str
    elements: int
    nbytes: int
    dtype: str | None = None


#: By their number in the file (ggml_type).
BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4, "F32"),
    1: BlockType("F16", 1, 2, "F16"),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, "BF16"),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
