"""The coding of planes is lossless for any bytes of any width, and saves space where elements changed little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.packed import planes
from zoo.packed.planes import Decoder, elements_of, encode

WIDTHS = st.sampled_from([1, 2, 4, 8])


def back(coded: list[bytes], base: bytes | None, width: int, delta: str, count: int) -> bytes:
    out = planes.empty(count * width)
    out[:] = b"\xaa" * len(out)  # earlier contents must not show
    Decoder().decode(coded, base, delta, elements_of(out, width))
    return bytes(out)


@given(st.data(), WIDTHS, st.sampled_from(["difference", "xor"]), st.integers(0, 300), st.sampled_from([-3, 1, 9]))
@settings(max_examples=150, deadline=None)
def test_any_bytes_against_any_base(data: st.DataObject, width: int, delta: str, count: int, level: int) -> None:
    """Structured like fine-tunes: some elements equal, some off by one, some arbitrary."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    base = draw.integers(0, 256, count * width, dtype=np.uint8)
    mine = base.copy()
    touched = draw.random(count * width) < data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    mine[touched] += draw.integers(0, 256 if data.draw(st.booleans()) else 2, int(touched.sum()), dtype=np.uint8)
    coded = encode(mine.tobytes(), base.tobytes(), width, delta, level)
    assert len(coded) == width
    assert all(len(plane) <= count for plane in coded)
    assert back(coded, base.tobytes(), width, delta, count) == mine.tobytes()


@given(st.binary(max_size=800), WIDTHS)
@settings(max_examples=60, deadline=None)
def test_any_bytes_alone(data: bytes, width: int) -> None:
    data = data[: len(data) // width * width]
    assert back(encode(data, None, width, "none", 1), None, width, "none", len(data) // width) == data


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("delta", ["difference", "xor"])
def test_equal_elements_take_nothing(width: int, delta: str) -> None:
    data = np.random.default_rng(1).bytes(64 * width)
    assert encode(data, data, width, delta, 1) == [b""] * width


def test_extremes() -> None:
    """Every pair of 8-bit elements, and the extremes of the wider types."""
    mine, base = (grid.astype(np.uint8).tobytes() for grid in np.meshgrid(np.arange(256), np.arange(256)))
    assert back(encode(mine, base, 1, "difference", 1), base, 1, "difference", 1 << 16) == mine
    for width in (2, 4, 8):
        ends = np.array(
            [0, 1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1], dtype=f"<u{width}"
        )
        mine, base = np.repeat(ends, 5).tobytes(), np.tile(ends, 5).tobytes()
        assert back(encode(mine, base, width, "difference", 1), base, width, "difference", 25) == mine


def test_small_moves_save_and_noise_costs_nothing() -> None:
    draw = np.random.default_rng(3)
    base = draw.integers(0, 1 << 16, 50_000, dtype=np.uint16)
    moved = base + draw.integers(-3, 4, 50_000).astype(np.uint16)
    assert sum(map(len, encode(moved.tobytes(), base.tobytes(), 2, "difference", 1))) < 0.3 * moved.nbytes
    noise = draw.bytes(100_000)
    assert sum(map(len, encode(noise, base.tobytes(), 2, "difference", 1))) <= len(noise)


def test_what_cannot_be_decoded_is_refused() -> None:
    data = bytes(i % 7 for i in range(4000))
    (coded,) = encode(data, None, 1, "none", 1)
    for broken in (coded[:-1], b"\0" * len(coded), encode(data + data, None, 1, "none", 1)[0], coded[:8]):
        with pytest.raises(ValueError, match="plane"):
            Decoder().decode([broken], None, "none", elements_of(planes.empty(4000), 1))
