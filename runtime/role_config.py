"""Settings of the roles of devices (`--roles`, `--role-changes`, table `[role_watch]`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: What a device runs (TI-04): contexts as far as they are known (`prefill`), tokens behind them (`decode`),
#: or everything.
RoleName = Literal["both", "prefill", "decode"]
#: Which device the scheduler gives the opposite role where such devices need help. `off`: none. `idle`: one with little
#: load (the paper's rule). `spare`: one whose load the other devices of its role can take.
RoleWatch = Literal["off", "spare", "idle"]


@dataclass(frozen=True, slots=True)
class RoleChangeConfig:
    """Configure changes of roles by the scheduler (TI-24).

    The load of a device for prompts is the share of the time in which it computes; that of one that decodes is the
    share of its pages, or of its places in steps, that is taken: it computes all the time even for a single answer.

    Fields:
        watch: Which device may leave its role.
        window_ms: Time over which loads are measured; it begins anew with each change, so that roles do not change more
            often (the paper: a minute).
        idle: Load below which a device is idle (the paper: 0.1).
        spare: Mean load below which the other devices of the role must stay with what one of them leaves to them.
        busy: Mean load from which on devices of a role need help; also if work for them waits in most of the window.
        drain_ms: Time after which a device keeps its role if what runs there has not ended.
    """

    watch: RoleWatch = "off"
    window_ms: int = 60_000
    idle: float = 0.1
    spare: float = 0.5
    busy: float = 0.9
    drain_ms: int = 120_000

    def __post_init__(self) -> None:
        if self.watch not in get_args(RoleWatch):
            raise ValueError(f"watch must be one of {', '.join(get_args(RoleWatch))}")
        if not (0.0 <= self.idle < self.busy <= 1.0 and 0.0 <= self.spare < self.busy):
            raise ValueError("idle and spare are at least 0 and below busy, busy is at most 1")
        if not 100 <= self.window_ms <= 86_400_000 or not 0 <= self.drain_ms <= 86_400_000:
            raise ValueError("window_ms is 100 to 86,400,000, drain_ms 0 to 86,400,000")
