"""Sums of what keys use, by key, day and model."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.records import KeyUsage

#: Usage of some keys: name -> day and model -> what was used.
UsageByModel = dict[str, dict[tuple[str, str], KeyUsage]]


def each_usage(usage: UsageByModel) -> Iterator[KeyUsage]:
    """Yield what was used, one by key, day and model."""
    for of_key in usage.values():
        yield from of_key.values()


def move_usage(usage: UsageByModel, to: UsageByModel) -> None:
    """Add usage to other usage, and empty it."""
    for each in each_usage(usage):
        merge_usage(to, each)
    usage.clear()


def merge_usage(usage: UsageByModel, used: KeyUsage) -> None:
    """Add what was used to other usage."""
    of_key, place = usage.setdefault(used.name, {}), (used.day, used.model)
    of_key[place] = of_key.get(place, KeyUsage(used.name, used.day, model=used.model)).plus(used)
