"""Run a program over a batch that decodes on: positions, angles and pages are updated in place from step to step.

Rows, adapters and layers stay those of the step that it was made from. `tables` has to be called whenever a row gets a
new page. The program's half layers are copied, so that the program itself may run other rows in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.kernels.operands import OnwardRows
from runtime.engine.kernels.program import Program
from runtime.engine.layers.rotary import RotaryTables
from runtime.engine.step.context import ForwardContext, PagedMetadata


@dataclass(frozen=True, slots=True)
class Attending:
    """What a program's attention needs: the pages of its rows in the step before, and the rotary tables."""

    paging: PagedMetadata
    rotary: RotaryTables


class Room:
    """A scratch buffer for calls that run one after another."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0)

    def reserve(self, count: int) -> Tensor:
        """Return a buffer of at least `count` floats; a larger one replaces the last."""
        if self._tensor.numel() < count:
            self._tensor = torch.empty(count)
        return self._tensor


class ProgramReuse:
    """A program bound to the rows of one batch.

    Args:
        room: Scratch buffer, shared with other batches.
        frame: Context of the step before, with rows of one token each.
        layers: Number of each half layer in the paging.
        attending: Pages and rotary tables; None if no half layer attends.
    """

    def __init__(
        self,
        program: Program,
        room: Room,
        frame: ForwardContext,
        layers: Sequence[int | None],
        attending: Attending | None,
    ) -> None:
        self._kernels, self._attending = program.kernels, attending
        self._halves, self._step, self._alive = program.bound(frame, layers)
        self._step.rows = frame.tokens
        self._room, self._widths, self._has = room, program.room, torch.empty(0)
        if attending is not None and program.like is not None:
            self._attend(attending.paging, program.like)

    def _attend(self, paging: PagedMetadata, like: Tensor) -> None:
        """Set up row state of its own, as it was in the step before, and point the step data to it."""
        step, view = self._step, paging.view(like)
        self._like, self._longest = torch.empty(1), int(paging.lengths.max())  # angles are float32
        self._covered = 0  # positions of the rotary tables that the rows read
        self._rows = rows = OnwardRows(
            paging.lengths.clone(), paging.page_tokens, paging.token_pages.shape[0], like.shape[-1]
        )
        step.k_pool, step.v_pool, step.narrow = view.k.data_ptr(), view.v.data_ptr(), view.k.dtype == torch.bfloat16
        step.page_stride, step.page_tokens = view.k.stride(0), paging.page_tokens
        step.token_pages, step.token_offsets, step.lengths = (
            rows.pages.data_ptr(),
            rows.offsets.data_ptr(),
            rows.lengths.data_ptr(),
        )
        step.cosine, step.sine = rows.cosine.data_ptr(), rows.sine.data_ptr()
        self.tables(paging.tables)

    def tables(self, tables: Tensor) -> None:
        """Set the rows' page tables [rows, layers, groups] for later steps."""
        step = self._step
        self._rows.lie(tables)
        step.tables, step.table_stride, step.layer_stride = tables.data_ptr(), tables.stride(0), tables.stride(1)

    def run(self, hidden: Tensor) -> None:
        """Run the next step of every row on `hidden` [1, rows, width], in place.

        Raises IndexError for a row without a page for its token.
        """
        if self._attending is not None:
            self._longest += 1
            if self._longest > self._covered:
                angles = self._attending.rotary.upto(self._like, self._longest)
                self._rows.turn(angles)
                self._covered = angles[0].shape[0]
            self._kernels.onward_(self._rows)
        room = self._room.reserve(self._step.rows * sum(self._widths))
        if room is not self._has:
            self._settle(room)
        self._kernels.layers_(hidden, self._halves, self._step)

    def _settle(self, room: Tensor) -> None:
        step, (normed, wide, _) = self._step, self._widths
        step.normed = room.data_ptr()
        step.wide = step.normed + 4 * step.rows * normed
        step.made = step.wide + 4 * step.rows * wide
        self._has = room
