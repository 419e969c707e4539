"""Settings of the order of waiting sequences (`--plan`, table `[order]`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: Which waiting sequence runs first (`scheduler.order.deadlines`). `off`: by priority, then arrival. `fcfs`: the same,
#: one strict queue of all models. `edf`: by priority, then deadline. `qlm`: by deadline too; those that are late anyway
#: go last, and running sequences give way to urgent ones (QL-09).
#: Groups of models that do not fit together run in a planned order. `paper`: as `qlm`, with the paper's equations.
Plan = Literal["off", "fcfs", "edf", "qlm", "paper"]

#: See `OrderConfig.assign`.
Assignment = Literal["backlog", "turns"]
#: See `OrderConfig.overload`.
Overload = Literal["queue", "edf", "reject"]


@dataclass(frozen=True, slots=True)
class OrderConfig:
    """Configure the order of sequences by deadline.

    Fields:
        soft_deadline_ms: Deadline of a request without `slo_ms` and `ttft_slo_ms`, from its arrival.
        evict: Whether running sequences give way to urgent ones (`qlm`).
        cap_batches: Whether rows that can wait are left out of steps that would be too long for an urgent sequence that
            runs (`qlm`).
        strict: Whether a sequence that does not fit holds back all later ones that need its devices (`edf`), as with
            `fcfs`: the baseline of the paper.
        cells: Whether each serving cell has a virtual queue of its own (`qlm`; QL-04), or one for all.
        backfill: Whether later sequences run while the first waiting one lacks pages, if by forecast its start does not
            wait for them (`edf` and `qlm`; `policy.slo.backfill`).
        slo_classes: Whether requests of nearly the same `slo_ms` may be in one group (`policy.slo.objectives`), or only
            those of the same. A plan orders whole groups: with fewer of them it has less to choose from.
        assign: Which cell a group gets that several may serve: the one that begins with it first (`backlog`,
            QL-12), or the next one in turn (`turns`, the paper's round robin), in which case it stays there.
        speeds: Whether forecasts and plans tell cells apart by how long work takes there (QL-22), or take all to be
            equally fast.
        group_batches: Most requests of a group, as a multiple of the mean number that run (QL-03; the paper's delta).
        plan_alpha: Probability with which a planned group is to be on time.
        plan_rounds: Moves that the search for a plan tries; 0: groups are only inserted.
        plan_duty: Most of the time that plans may be solved, as a share.
        run_floor: A model that was loaded serves its requests for at least so many times the duration of its load
            before another one takes its place, unless that one would be late; 0: no such limit. With a plan.
        read_ahead: Whether host memory gets the weights of the models that are needed next, in the order of the queue
            (QL-13). With a plan, where models do not fit together and there is host memory.
        short_first_ms: Among requests of one priority and objective, those with short expected answers go first, and
            each is overtaken only by what comes within so many ms after it, at most half of the objective
            (`policy.slo.short_first`); 0: by arrival. Where no plan orders.
        fill_drains: Whether a model that is about to leave still takes urgent sequences, if what it leaves for is on
            time all the same (`scheduler.residency.drains`). With a plan, where models share devices.
        exclusive: Whether each serving cell has one model at a time (QL-13), as in the paper: when the head of its
            queue needs another one, what runs gives way unless it is ahead of the head, and the model leaves even where
            there is room for both. With a plan, where models are loaded on demand (`residency`).
        turn_ms: Where models do not fit together, one serves for so many ms, or its run floor, while another waits, and
            then gives way in the midst of its answers, whatever their deadlines, to the one with the oldest turn
            (`scheduler.residency.turns`); 0: no turns. With a plan, in place of a planned order.
        overload: What becomes of requests where late ones remain in the best plan (QL-19): all wait in the planned
            order (`queue`) or by deadline (`edf`), or new ones that will most likely be late are refused (`reject`).
    """

    plan: Plan = "off"
    soft_deadline_ms: int = 600_000
    evict: bool = True
    cap_batches: bool = True
    strict: bool = False
    slo_classes: bool = False
    backfill: bool = False
    group_batches: int = 4
    cells: bool = True
    assign: str = "backlog"
    speeds: bool = True
    plan_alpha: float = 0.95
    plan_rounds: int = 40_000
    plan_duty: float = 0.05
    run_floor: float = 2.0
    read_ahead: bool = False
    short_first_ms: int = 0
    fill_drains: bool = True
    exclusive: bool = False
    turn_ms: int = 0
    overload: str = "edf"

    def __post_init__(self) -> None:
        if self.plan not in get_args(Plan):
            raise ValueError(f"plan must be one of {', '.join(get_args(Plan))}")
        if min(self.soft_deadline_ms, self.group_batches) < 1:
            raise ValueError("soft_deadline_ms and group_batches are at least 1")
        for name in ("short_first_ms", "turn_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is at least 0")
        if self.turn_ms and (self.exclusive or not self.evict):
            raise ValueError("turn_ms goes with evict, and without exclusive")
        if not 0.0 < self.plan_alpha < 1.0 or not 0.0 < self.plan_duty <= 1.0 or not 0 <= self.plan_rounds <= 10**7:
            raise ValueError("plan_alpha and plan_duty are shares, and plan_rounds is 0 to 10,000,000")
        if not 0.0 <= self.run_floor < float("inf") or self.overload not in get_args(Overload):
            raise ValueError("run_floor is at least 0, and overload queue, edf or reject")
        if self.assign not in get_args(Assignment):
            raise ValueError("assign must be one of backlog, turns")

    @property
    def by_deadline(self) -> bool:
        return self.plan in ("edf", "qlm", "paper")

    @property
    def holds_all(self) -> bool:
        """Whether a sequence that does not fit holds back all later ones that need its devices."""
        return self.plan == "fcfs" or (self.plan == "edf" and self.strict)

    @property
    def backfills(self) -> bool:
        return self.backfill and self.by_deadline and not self.holds_all

    @property
    def plans(self) -> bool:
        """Whether groups may run in a planned order."""
        return self.plan in ("qlm", "paper")

    @property
    def floor(self) -> float:
        """How many times its load a model serves at least before another one takes its place; 0: no limit."""
        return self.run_floor if self.plans else 0.0

    @property
    def reads_ahead(self) -> bool:
        return self.plans and self.read_ahead

    @property
    def takes_turns(self) -> bool:
        """Whether models that do not fit together take turns."""
        return self.evicts and self.turn_ms > 0

    @property
    def excludes(self) -> bool:
        """Whether each cell has one model at a time."""
        return self.plans and self.exclusive

    @property
    def fills_drains(self) -> bool:
        """Whether a model that is about to leave still takes urgent sequences."""
        return self.plans and self.fill_drains and not self.exclusive

    @property
    def evicts(self) -> bool:
        return self.plans and self.evict

    @property
    def by_cell(self) -> bool:
        return self.plans and self.cells

    @property
    def caps(self) -> bool:
        return self.plan == "qlm" and self.cap_batches
