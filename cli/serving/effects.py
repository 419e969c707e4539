"""Options of `zoo serve` that would change nothing beside the others: refused, with what is missing.

Contract: what was left as it is by default is never refused. Knows no meanings, only which option needs which.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from zoo.errors import InputError

if TYPE_CHECKING:
    from cli.serving.options import ServeOptions

#: What several devices need.
_SEVERAL = ("placing", "balancing", "boundary_bytes", "dispatch", "paths", "speculation", "tensors")
#: What a cluster's scheduler, or an agent, does.
_SCHEDULED = ("sharing", "block_rows", "agent_weights", "linger_us", "adaptive")
#: What an agent in the scheduler's own thread has no need of: whatever is due back has come before its next step.
_APART = ("linger_us",)
#: What the dense executor does, and the driver of one device.
_DENSE = ("dense_mode", "dense_slots", "dense_padding")
_LOCAL = ("async_scheduling",)
#: How stand-ins are chosen.
_ADAPTIVE = ("equivalent", "stitched")


def require_effects(options: ServeOptions, executor: str | None = None) -> None:
    """Raises InputError for the first option that would have none. `executor`: the one that was chosen, once that is
    known.
    """
    default = type(options)()
    changed = {field.name for field in fields(options) if getattr(options, field.name) != getattr(default, field.name)}
    runs = executor or options.executor
    backend, because = options.settled(runs).backend, options.alone_because(runs)
    alone = "without agents: give --agents or --backend" if because is None else f"without a scheduler: {because}"
    refused = [
        (_SEVERAL, options.agents == 1, "on one device: give --agents"),
        (_SCHEDULED, backend == "local", alone),
        (_APART, backend == "inline", "on the only agent, which waits for nobody: give --agents"),
        (
            _DENSE,
            options.clustered or options.executor == "paged",
            "without the dense executor, which is for one device: give --executor dense",
        ),
        (_LOCAL, options.clustered, "on agents, which look no step ahead"),
        (
            _ADAPTIVE,
            not options.deltas or backend == "local",
            "without stand-ins: give --deltas, and no --backend local",
        ),
        (("speculation_lane",), options.speculation == "off", "where no hop is predicted: give --speculation"),
    ]
    for names, idle, why in refused:
        for name in names:
            if idle and name in changed:
                raise InputError(f"--{name.replace('_', '-')} has no effect {why}")
