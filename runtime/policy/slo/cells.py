"""Partition devices into serving cells: sets that can run chains from end to end (UN-02).

Each cell has one virtual queue (QL-04), and a request runs within the cell that it is assigned to. Cells are as small
as the placement of blocks allows: a device that holds whole chains is one of its own; where a chain is cut over
devices, each copy of it joins the devices that it is on. A device is in exactly one cell, and every chain that is
placed fits in one. Where prompts and decoding are apart (TI-04), a cell has devices for both. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ServingCell(NamedTuple):
    """Devices that run chains from end to end. `name`: that of its first device."""

    name: str
    devices: frozenset[str]


def cells_of(
    devices: Sequence[str], chains: Iterable[Sequence[Sequence[str]]], apart: bool = False
) -> tuple[ServingCell, ...]:
    """Return the cells in the order of their first devices.

    Args:
        chains: For each chain and each block of it the devices that hold it, in the order in which copies were placed.
        apart: Whether a sequence may be handed off from any device that has its chain to any other one.
    """
    joined = {name: name for name in devices}
    for blocks in chains:
        if apart:
            _join(joined, [name for holders in blocks for name in holders])
            continue
        if not blocks or set.intersection(*(set(holders) for holders in blocks)):
            continue  # one device runs all of it
        copies = min(len(holders) for holders in blocks)
        for copy in range(copies):
            # What the last copy has more of may be needed by any path of it.
            last = copy == copies - 1
            _join(
                joined, [name for holders in blocks for name in (holders[copy:] if last else holders[copy : copy + 1])]
            )
    members: dict[str, list[str]] = {}
    for name in devices:
        members.setdefault(_root(joined, name), []).append(name)
    return tuple(ServingCell(names[0], frozenset(names)) for names in members.values())


def _root(joined: dict[str, str], name: str) -> str:
    while joined[name] != name:
        name = joined[name]
    return name


def _join(joined: dict[str, str], names: Sequence[str]) -> None:
    for name in names[1:]:
        joined[_root(joined, name)] = _root(joined, names[0])
