"""Run TetriInfer's Figures 2 to 5 on the simulator's scheduler and agents, beside the paper's numbers.

    python -m benchmarks.simulated.tetri_figures [--picture FILE] [--output FILE]

OPT-13B on two V100 that split every matrix: one does not hold the K and V of Figure 5. `roofline`: the table's costs;
`fitted`: with the parameters of `tetri_fit`. Printed is a row for each number of the paper's text, then the curves.
`--picture` draws them. Virtual time: the same figures on any machine, within half a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from benchmarks.simulated.tetri_runs import HEAVY_PROMPT, LIGHT_PROMPT, PROMPT_TOKENS, ROWS, Rig
from runtime.policy.prefill.knee import knee_of

#: Kinds of device by the name of their costs.
KINDS: Mapping[str, str] = {"roofline": "2xV100-32GB", "fitted": "2xV100-tetri"}
#: How many run beside a request in Figures 3 and 4; heavy prompts in Figure 3 (b); shares of heavy decodes in Figure 5.
BESIDE, HEAVY_BESIDE, HEAVY_SHARES = (1, 3, 7, 15, 31, 63, 127), (1, 2, 3, 7), (0.0, 0.25, 0.5, 0.75)
#: Decoding rows behind which Figure 2's rate should stay.
_PLATEAU = (128, 256, 512)
Curve = dict[float, float]


def curves_of(kind: str) -> dict[str, Curve]:
    """Return all curves by name: rates in tokens per second, other values over the request alone."""
    rig = Rig(kind)
    light, heavy = rig.prompts(LIGHT_PROMPT), rig.prompts(HEAVY_PROMPT)
    full = {share: rig.steady(share) for share in HEAVY_SHARES}

    def decode(*prompts: int) -> float:
        step = rig.beside(1, *prompts)
        return step.beside / step.alone

    return {
        "2: prompt tokens/s": {each: each / rig.prompts(each) * 1e3 for each in PROMPT_TOKENS},
        "2: decoded tokens/s": {each: rig.decoding(each) for each in ROWS},
        "3a: light prompt beside light ones": {
            each: rig.prompts(*[LIGHT_PROMPT] * (each + 1)) / light for each in BESIDE
        },
        "3b: light prompt beside heavy ones": {
            each: rig.prompts(LIGHT_PROMPT, *[HEAVY_PROMPT] * each) / light for each in HEAVY_BESIDE
        },
        "3c: heavy prompt beside light ones": {
            each: rig.prompts(HEAVY_PROMPT, *[LIGHT_PROMPT] * each) / heavy for each in BESIDE
        },
        "4a: decode beside light prompts": {each: decode(*[LIGHT_PROMPT] * each) for each in BESIDE},
        "4b: decode beside heavy prompts": {each: decode(*[HEAVY_PROMPT] * each) for each in HEAVY_BESIDE},
        "4c: light prompt beside decodes": {each: rig.beside(each, LIGHT_PROMPT).beside / light for each in BESIDE},
        "4d: heavy prompt beside decodes": {each: rig.beside(each, HEAVY_PROMPT).beside / heavy for each in BESIDE},
        "5: tokens/s": {share: each.rate for share, each in full.items()},
        "5: ms per token": {share: each.per_token for share, each in full.items()},
    }


def _plateau(curves: Mapping[str, Curve]) -> str:
    rate = curves["2: decoded tokens/s"]
    gains = (rate[after] / rate[before] - 1 for before, after in pairwise(_PLATEAU))
    return ", ".join(f"{gain:+.0%}" for gain in gains)


def _change(name: str) -> Callable[[Mapping[str, Curve]], str]:
    return lambda curves: f"{curves[name][0.5] / curves[name][0.0] - 1:+.1%}"


def _times(name: str, at: float) -> Callable[[Mapping[str, Curve]], str]:
    return lambda curves: f"{curves[name][at]:.2f}"


def _ints(curve: Curve) -> dict[int, float]:
    return {round(size): rate for size, rate in curve.items()}


#: What the paper's text says, its number, and the same of the curves.
SAID: tuple[tuple[str, str, Callable[[Mapping[str, Curve]], str]], ...] = (
    ("2: knee of prompts, tokens", "512", lambda curves: str(knee_of(_ints(curves["2: prompt tokens/s"])).tokens)),
    ("2: decodes, 128 to 256 to 512 rows", "a plateau", _plateau),
    ("3a: light prompt beside 7 light", "2", _times("3a: light prompt beside light ones", 7)),
    ("3a: light prompt beside 63 light", "8", _times("3a: light prompt beside light ones", 63)),
    (
        "3b: light prompt beside heavy, 1",
        "> 10, of how many is not said",
        _times("3b: light prompt beside heavy ones", 1),
    ),
    ("3b: 3", "", _times("3b: light prompt beside heavy ones", 3)),
    (
        "3c: heavy prompt beside 63 light",
        "3, of how many is not said",
        _times("3c: heavy prompt beside light ones", 63),
    ),
    ("4b: decode beside 1 heavy prompt", "5", _times("4b: decode beside heavy prompts", 1)),
    ("4c: light prompt beside 7 decodes", "1", _times("4c: light prompt beside decodes", 7)),
    ("4c: light prompt beside 15 decodes", "more", _times("4c: light prompt beside decodes", 15)),
    ("4c: light prompt beside 127 decodes", "up to 2.5", _times("4c: light prompt beside decodes", 127)),
    ("4d: heavy prompt beside 127 decodes", "up to 2.5", _times("4d: heavy prompt beside decodes", 127)),
    ("5: 128 decodes, half heavy: tokens/s", "-16 %", _change("5: tokens/s")),
    ("5: 128 decodes, half heavy: ms per token", "+23 %", _change("5: ms per token")),
)


def document() -> dict[str, Any]:
    """Return the paper's numbers beside each cost's, and the curves."""
    found = {name: curves_of(kind) for name, kind in KINDS.items()}
    said = [{"what": what, "paper": paper, **{name: cell(found[name]) for name in found}} for what, paper, cell in SAID]
    return {"kinds": dict(KINDS), "said": said, "curves": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    made = document()
    print(f"| Figure | the paper | {' | '.join(KINDS)} |\n{'|---' * (2 + len(KINDS))}|")
    for row in made["said"]:
        print(f"| {row['what']} | {row['paper']} | {' | '.join(row[name] for name in KINDS)} |")
    if given.picture:
        from benchmarks.simulated.tetri_plots import draw

        draw(made["curves"], given.picture)
    deliver(made, given.output)


if __name__ == "__main__":
    main()
