"""Tensors converted to arrays and back: the same bytes in every dtype, copied once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.chains import Stacked, cut
from runtime.engine.tensors.convert import array_of, gathered, joined, whole_of


def arrays_of(hidden, spans):
    """Return each row's tokens [lo, hi), cut out of the whole."""
    return [cut(whole_of(hidden), lo, hi) for lo, hi in spans]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_and_in_again(dtype):
    hidden = torch.randn(1, 7, 12).to(dtype)
    spans = [(0, 1), (1, 4), (4, 7)]
    arrays = arrays_of(hidden, spans)
    assert [(each.dtype, each.shape) for each in arrays] == [(str(dtype)[6:], (hi - lo, 12)) for lo, hi in spans]
    assert torch.equal(joined(arrays, (7, 12), dtype), hidden[0])
    for held in (
        bytes,
        bytearray,
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: memoryview(bytes(data)).cast("H"),
    ):
        sent = [type(each)(each.dtype, each.shape, held(each.data)) for each in arrays[::-1]]
        assert torch.equal(joined(sent, (7, 12), dtype), hidden[0, [4, 5, 6, 1, 2, 3, 0]])


def test_what_goes_out_is_not_copied_and_what_comes_in_is():
    hidden = torch.zeros(1, 3, 4)
    (array,) = arrays_of(hidden[:, 1:], [(0, 2)])
    hidden[0, 1, 0] = 1
    back = joined([array], (2, 4), torch.float32)
    assert back[0, 0] == 1 and array.data.contiguous
    hidden[0, 1, 0] = 2
    assert back[0, 0] == 1


def test_rows_in_one_piece_are_given_by_name_whatever_their_order():
    hidden = torch.randn(1, 4, 3)
    came = Stacked(["a", "b", "c"], whole_of(hidden), [1, 2, 1])
    assert torch.equal(gathered(came, ["a", "b", "c"], (4, 3), torch.float32), hidden[0])
    assert torch.equal(gathered(came, ["c", "a", "b"], (4, 3), torch.float32), hidden[0, [3, 0, 1, 2]])
    assert torch.equal(gathered(came, ["b"], (2, 3), torch.float32), hidden[0, 1:3])
    with pytest.raises(KeyError):
        gathered(came, ["a", "d"], (2, 3), torch.float32)


def test_turned_states_are_brought_into_order():
    hidden = torch.randn(4, 3).t()[None]
    assert torch.equal(joined(arrays_of(hidden, [(0, 3)]), (3, 4), torch.float32), hidden[0])


def test_what_does_not_fit_is_refused():
    array = array_of(torch.zeros(2, 4))
    for wrong in (
        ([array], (3, 4), torch.float32),
        ([array, array], (3, 4), torch.float32),
        ([array], (4, 2), torch.float32),
        ([array], (2, 4), torch.bfloat16),
        ([], (1, 4), torch.float32),
        ([type(array)("float32", (2, 4), bytes(31))], (2, 4), torch.float32),
    ):
        with pytest.raises(ValueError):
            joined(*wrong)
    assert joined([], (0, 4), torch.float32).shape == (0, 4)
