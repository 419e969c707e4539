"""Give requests of a demand classes with service-level objectives: interactive ones beside a batch (QLM, section 7).

Which request is of which class is drawn; a class may have lengths of its own, and arrive within a part of the demand's
time, down to all at once. A function of settings and seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from runtime.bench.lengths import draw, parse_lengths
from runtime.sim.run.clock import Streams
from runtime.sim.workload.requests import Demand, RequestClass
from zoo.errors import InputError


@dataclass(frozen=True, slots=True)
class ClassSettings:
    """Settings of a class.

    Fields:
        share: Of all requests.
        slo_ms: Time in which a request's whole answer is to be there; 0: none.
        ttft_slo_ms: Instead, time in which its first token is to be there (QL-21); 0: none.
        prompts, answers: Lengths in tokens; empty: those of the demand.
        within: Share of the demand's time in which they arrive; 0: all at its start.
    """

    share: float
    slo_ms: int = 0
    priority: int = 0
    prompts: str = ""
    answers: str = ""
    within: float = 1.0
    ttft_slo_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.ttft_slo_ms < 2**31 or (self.slo_ms and self.ttft_slo_ms):
            raise InputError("a class has slo_ms or ttft_slo_ms, each from 0")
        if not 0 < self.share <= 1 or not 0 <= self.within <= 1 or not 0 <= self.slo_ms < 2**31:
            raise InputError("a class has a share in (0, 1], `within` in [0, 1], and slo_ms from 0")


def classed(demand: Demand, classes: Mapping[str, ClassSettings], longest: int, streams: Streams) -> Demand:
    """Return the demand with classes; `longest`: tokens of prompt and answer together, at most. Raises InputError."""
    if not classes:
        return demand
    if abs(sum(each.share for each in classes.values()) - 1) > 1e-6:
        raise InputError("the shares of all classes together are 1")
    settings = list(classes.values())
    shares = np.cumsum([each.share for each in settings])
    kind = np.minimum(np.searchsorted(shares, streams.named("classes").random(len(demand))), len(settings) - 1)
    at, prompt, answer = demand.at.copy(), demand.prompt.copy(), demand.answer.copy()
    begin = int(at[0]) if len(at) else 0
    for number, (name, each) in enumerate(classes.items()):
        mine = kind == number
        at[mine] = np.rint(begin + (at[mine] - begin) * each.within).astype(np.int64)
        for text, column in ((each.prompts, prompt), (each.answers, answer)):
            if text:
                stream = streams.named(f"{'prompts' if column is prompt else 'answers'} of {name}")
                column[mine] = draw(parse_lengths(text), int(mine.sum()), stream)
    prompt = np.minimum(prompt, longest - 1)
    answer = np.minimum(answer, longest - prompt)
    order = np.argsort(at, kind="stable")
    made = replace(demand, at=at[order], model=demand.model[order], prompt=prompt[order], answer=answer[order])
    named = tuple(
        RequestClass(name, each.slo_ms or None, each.priority, each.ttft_slo_ms or None)
        for name, each in classes.items()
    )
    return replace(made, classes=named, kind=kind[order].astype(np.int64))
