"""Settings of where and when sequences decode (`--decode-admission`, `--decode-choice`, table `[decode]`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: Which pages are to be free for a sequence (`policy.roles.reservation`).
ReserveRule = Literal["greedy", "static", "dynamic", "peak"]
#: Which path decodes a sequence (`policy.roles.decode_choice`). `load`: the one with the fewest sequences.
DecodeRule = Literal["load", "po2", "least", "random", "worst"]


#: When K and V go to where a sequence decodes. `request`: when its whole prompt is computed. `chunk`: each chunk when
#: it is computed. `layer`: also those of each layer of the last chunk, while its later layers are computed.
HandoffGrain = Literal["request", "chunk", "layer"]
#: What a sequence does from its first token until its K and V are where it is to decode.
UntilHandoff = Literal["rest", "decode"]


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Configure decoding.

    Fields:
        admission: Which pages must be free for a sequence that begins to decode on a device, or runs its prompt where
            it will decode (TI-20 to TI-22; `policy.roles.reservation`).
        choice: Which of several paths decodes a sequence that is handed off (TI-14; `policy.roles.decode_choice`).
        grain: When K and V of a sequence that is handed off travel (TI-15).
        until_handoff: What a sequence does until it is handed off: it rests, or decodes on the path of its prompt, as
            long as there are free pages for that.
        local_prefill: Most tokens of a prompt behind a cached prefix on a device that decodes, for which it runs there
            and is not handed off (`policy.roles.remainder`); 0: it never does.
        quantile: Share of the answers of a kind that are expected to be no longer than what `admission` reckons with.
        heavy_tokens: An answer of more tokens than this is a heavy decode (the paper: 128).
        present_margin: By how much worse a path may be that has all K and V of a sequence than one that has none, for
            `load`, `po2` and `least`: by its sequences, or by its shares of heavy decodes and of free pages; 0: what
            is there does not count.
        probe_steps: With `--lengths probe`, steps of a device after which the lengths of all answers that it decodes
            are forecast again; 0: they are forecast once.
        load_reports_ms: Period of the reports of loads that `choice` is made from (TI-03); 0: the loads themselves.
    """

    admission: ReserveRule = "greedy"
    choice: DecodeRule = "load"
    grain: HandoffGrain = "request"
    until_handoff: UntilHandoff = "rest"
    local_prefill: int = 0
    quantile: float = 0.4
    heavy_tokens: int = 128
    present_margin: float = 0.05
    probe_steps: int = 0
    load_reports_ms: int = 0

    def __post_init__(self) -> None:
        if self.admission not in get_args(ReserveRule):
            raise ValueError(f"admission must be one of {', '.join(get_args(ReserveRule))}")
        if self.choice not in get_args(DecodeRule):
            raise ValueError(f"choice must be one of {', '.join(get_args(DecodeRule))}")
        if self.grain not in get_args(HandoffGrain):
            raise ValueError(f"grain must be one of {', '.join(get_args(HandoffGrain))}")
        if self.until_handoff not in get_args(UntilHandoff):
            raise ValueError(f"until_handoff must be one of {', '.join(get_args(UntilHandoff))}")
        if not 0 <= self.local_prefill <= 1_000_000:
            raise ValueError("local_prefill is at least 0, in tokens")
        if not 0.0 < self.quantile < 1.0 or self.heavy_tokens < 0 or not 0 <= self.load_reports_ms <= 3_600_000:
            raise ValueError("quantile is above 0 and below 1, heavy_tokens and load_reports_ms at least 0")
        if not 0.0 <= self.present_margin <= 1.0 or self.probe_steps < 0:
            raise ValueError("present_margin is from 0 to 1, probe_steps at least 0")

    @property
    def needs_lengths(self) -> bool:
        """Whether anything depends on how long answers are expected to get."""
        return self.admission != "greedy" or self.choice not in ("load", "random")
