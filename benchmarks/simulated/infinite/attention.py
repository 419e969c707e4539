"""Price Infinite-LLM's Figures 11 and 12 with the simulator's own costs: attention in two parts, and pulling K and V.

    python -m benchmarks.simulated.infinite.attention

Figure 11: one decoding row on eight A100, of which two instances of four hold a half of the context each, beside eight
that split every matrix. Figure 12: lent tokens attended to where they are, beside their K and V pulled over and
attended to here; the time that no attention of the debtor hides. Microseconds of a layer. No random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.sim.cost.hardware import LINKS, gpu_named
from runtime.sim.cost.loans import EXTRA_NS, LentWork, attending_ns, least_lent, pulled_ns, travel_ns, waiting_ns
from runtime.sim.models.shapes import SHAPES

MODELS = ("llama-7b", "llama-13b", "llama2-70b")
CONTEXTS = (10_000, 50_000, 100_000, 200_000, 400_000, 800_000)
LENT = (1, 16, 256, 4096, 65_536)


@dataclass(frozen=True, slots=True)
class PartsBeside:
    """Attention of one layer in ns: over eight devices, and in two parts of four devices each."""

    whole: float
    parts: float

    @property
    def overhead(self) -> float:
        """The share by which parts take longer."""
        return self.parts / self.whole - 1


def in_parts(model: str, context: int) -> PartsBeside:
    """Return one decoding row's attention to a context of which the second instance holds a half (Figure 11)."""
    shape, eight, four = SHAPES[model], gpu_named("8xA100-80GB"), gpu_named("4xA100-80GB")
    half, whole = LentWork(1), LentWork(1)
    half.add_row(1, context // 2)
    whole.add_row(1, context)
    here = attending_ns(shape, half, four)
    creditor = travel_ns(shape, half, LINKS["nvlink3"]) + attending_ns(shape, half, four)
    return PartsBeside(attending_ns(shape, whole, eight), here + waiting_ns([creditor], here, 1))


@dataclass(frozen=True, slots=True)
class RemoteBeside:
    """What one layer with lent tokens takes in ns: attended to where they are, and after they have been pulled."""

    remote: float
    pulled: float


def remote(model: str, lent: int, link: str) -> RemoteBeside:
    """Return both ways for one decoding row with so many lent tokens (Figure 12), on one A100 each."""
    shape, gpu, work = SHAPES[model], gpu_named("A100-80GB"), LentWork(1)
    work.add_row(1, lent)
    attention = attending_ns(shape, work, gpu)
    return RemoteBeside(
        travel_ns(shape, work, LINKS[link]) + attention + EXTRA_NS, pulled_ns(shape, 1, lent, LINKS[link]) + attention
    )


def lines() -> Iterator[str]:
    yield f"| Figure 11: {' | '.join(f'{each:,}' for each in CONTEXTS)} |"
    for model in MODELS:
        found = [in_parts(model, context) for context in CONTEXTS]
        cells = (
            f"{each.whole / 1e3:.0f} + {(each.parts - each.whole) / 1e3:.0f} ({each.overhead:.0%})" for each in found
        )
        yield f"| {model} | {' | '.join(cells)} |"
    yield f"| Figure 12: {' | '.join(f'{each:,}' for each in LENT)} | fewer bytes from |"
    for model in MODELS:
        for link in ("nvlink3", "200gbps"):
            both = [remote(model, lent, link) for lent in LENT]
            cells = (f"{each.remote / 1e3:.0f}, {each.pulled / 1e3:.0f}" for each in both)
            yield f"| {model}, {link} | {' | '.join(cells)} | {least_lent(SHAPES[model])} |"


if __name__ == "__main__":
    print("\n".join(lines()))
