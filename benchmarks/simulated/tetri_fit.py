"""Fit the cost of a step to TetriInfer's Figures 2 to 4: how slow products of few tokens and attention in prompts are.

    python -m benchmarks.simulated.tetri_fit

Three parameters of `sim.cost.hardware.Gpu` are fitted for OPT-13B on two V100: `compute_share`, `half_tokens` and
`prompt_share`. Bandwidth, its shares and the time per layer and step stay those of the table. A candidate is judged by
ratios of step times, as the paper's text gives them, priced by the simulator's own cost code. Figure 5 is not fitted.
`tetri_figures` runs all four on the scheduler.

Printed per model of the cost: parameters, misfit, and each ratio. `roofline`: as in the table; `roofline, fitted`:
with shares alone; `fitted`: with all three. The last one is what the kinds named `-tetri` have, rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulated.tetri_runs import HEAVY_PROMPT, LIGHT_PROMPT, PROMPT_TOKENS
from runtime.sim.cost.blocks import BlockWork, table_cost
from runtime.sim.cost.hardware import GPUS, Gpu
from runtime.sim.models.shapes import SHAPES

#: Context of a light decode in its middle, in tokens.
_CONTEXT = LIGHT_PROMPT + 30
#: Weight of a broken bound beside a ratio that is off by as much.
_BOUND = 1000.0


@dataclass(frozen=True, slots=True)
class Target:
    """What the paper says of a ratio: that it is `near` a value, at `least` one, or at `most` one."""

    name: str
    near: float | None = None
    least: float | None = None
    most: float | None = None

    def misfit(self, ratio: float) -> float:
        """Return the squared error of a ratio's logarithm; a bound that holds has none."""
        if self.near is not None:
            return math.log(ratio / self.near) ** 2
        low = max(0.0, math.log(self.least / ratio)) if self.least is not None else 0.0
        high = max(0.0, math.log(ratio / self.most)) if self.most is not None else 0.0
        return _BOUND * (low**2 + high**2)

    @property
    def words(self) -> str:
        if self.near is not None:
            return f"{self.near:g}"
        return f"> {self.least:g}" if self.least is not None else f"< {self.most:g}"


#: Bounds of Figure 2 have a margin of half a percent around the 5 % of the knee (TI-09).
TARGETS: Sequence[Target] = (
    Target("2: rate at 512 tokens, of the best", least=0.955),
    Target("2: rate at 256 tokens, of the best", most=0.945),
    Target("2: rate at 2048 tokens, of the best", least=0.95),
    Target("3: light prompt beside 7 light", near=2.0),
    Target("3: light prompt beside 63 light", near=8.0),
    Target("3: light prompt beside 3 heavy", least=10.0),
    Target("3: heavy prompt beside 63 light", near=3.0),
    Target("4: decode beside 1 heavy prompt", near=5.0),
    Target("4: light prompt beside 7 decodes", most=1.1),
    Target("4: light prompt beside 127 decodes", near=2.5),
)
#: Where searches begin, and the factors of it.
_BEGIN: Mapping[str, float] = {"compute_share": 0.6, "half_tokens": 50.0, "prompt_share": 0.3}
_SCALES = (0.5, 0.8, 1.0, 1.5)


def step_ms(gpu: Gpu, decodes: int = 0, prompts: Sequence[int] = ()) -> float:
    """Return the ms of a step of OPT-13B with so many light decodes and prompts of so many tokens."""
    shape = SHAPES["opt-13b"]
    work = BlockWork(decodes, decodes * _CONTEXT)
    for tokens in prompts:
        work.add_row(0, tokens)
    return (table_cost(shape, 0, shape.components, gpu).ns(work) + gpu.part_ns) / 1e6


def ratios_of(gpu: Gpu) -> dict[str, float]:
    """Return the ratio of each target."""
    rates = {tokens: tokens / step_ms(gpu, 0, [tokens]) for tokens in PROMPT_TOKENS}
    best = max(rates.values())
    light, heavy = step_ms(gpu, 0, [LIGHT_PROMPT]), step_ms(gpu, 0, [HEAVY_PROMPT])
    values = (
        *(rates[tokens] / best for tokens in (512, 256, 2048)),
        *(step_ms(gpu, 0, [LIGHT_PROMPT] * (1 + more)) / light for more in (7, 63)),
        step_ms(gpu, 0, [LIGHT_PROMPT, *[HEAVY_PROMPT] * 3]) / light,
        step_ms(gpu, 0, [HEAVY_PROMPT, *[LIGHT_PROMPT] * 63]) / heavy,
        step_ms(gpu, 1, [HEAVY_PROMPT]) / step_ms(gpu, 1),
        *(step_ms(gpu, rows, [LIGHT_PROMPT]) / light for rows in (7, 127)),
    )
    return dict(zip((target.name for target in TARGETS), values, strict=True))


def misfit(gpu: Gpu) -> float:
    found = ratios_of(gpu)
    return sum(target.misfit(found[target.name]) for target in TARGETS)


def fitted(gpu: Gpu, names: Sequence[str]) -> Gpu:
    """Return the kind of device with these parameters fitted: the best of searches from several begins."""
    from scipy.optimize import minimize

    def made(logs: Sequence[float]) -> Gpu:
        values = {name: math.exp(value) for name, value in zip(names, logs, strict=True)}
        return replace(
            gpu, **{name: min(each, 1.0) if name.endswith("_share") else each for name, each in values.items()}
        )  # type: ignore[arg-type]

    searches = [
        minimize(
            lambda logs: misfit(made(logs)), [math.log(_BEGIN[name] * scale) for name in names], method="Nelder-Mead",
            options={"maxiter": 3000, "maxfev": 3000, "xatol": 1e-6, "fatol": 1e-9},
        )
        for scale in _SCALES
    ]  # fmt: skip
    return made(min(searches, key=lambda each: each.fun).x)


def candidates() -> dict[str, Gpu]:
    """Return the kinds of device that are compared."""
    table = GPUS["2xV100-32GB"]
    return {
        "roofline": table,
        "roofline, fitted": fitted(table, ("compute_share", "prompt_share")),
        "fitted": fitted(table, tuple(_BEGIN)),
        "as stored": GPUS["2xV100-tetri"],
    }


def main() -> None:
    found = candidates()
    ratios = {name: ratios_of(gpu) for name, gpu in found.items()}
    print(f"|  | the paper | {' | '.join(found)} |\n{'|---' * (2 + len(found))}|")
    for name in _BEGIN:
        _row(name, "", [f"{getattr(gpu, name):.3g}" for gpu in found.values()])
    _row("misfit", "", [f"{misfit(gpu):.3f}" for gpu in found.values()])
    for target in TARGETS:
        _row(target.name, target.words, [f"{each[target.name]:.3g}" for each in ratios.values()])


def _row(name: str, words: str, cells: Sequence[str]) -> None:
    print(f"| {name} | {words} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
