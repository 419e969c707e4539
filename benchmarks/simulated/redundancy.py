"""BlockLLM's Table 1 and Figure 5 for the simulator's applications: weights in common, and needless loads.

- Table 1: the share of a fine-tune's weights that are its foundation's, as the simulated family has it.
- Figure 5: of all models stored apart, the share of bytes that another model has, too; and the bytes that come to one
  A100 when applications are requested in a random order, as a share of what whole models would load. Both sides replace
  what was used least recently.

Numbers of the family alone, without a run; the order of requests is drawn from the seed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from runtime.chains import Stage
from runtime.sim.cost.hardware import GPUS
from runtime.sim.cost.steps import Pricing
from runtime.sim.models.family import SHARED, Cutting, family_of
from runtime.sim.workload.generators import paper_apps

_REQUESTS = 1000
#: Bytes of weights that the device holds: an A100 of 80 GB, nine tenths of it.
_DEVICE = 72 * 10**9


def shared_weights() -> list[list[str]]:
    """Return Table 1: a row for each kind of fine-tune."""
    return [["kind", "shared"], *([kind, f"{100 * share:.2f} %"] for kind, share in SHARED.items())]


def redundant(apps: int) -> float:
    """Return the share of the bytes of all models that at least one other model has, too."""
    pieces = _pieces(apps)
    users = Counter(name for model in pieces for name in model)
    sizes = [(name, nbytes) for model in pieces for name, nbytes in model.items()]
    return sum(nbytes for name, nbytes in sizes if users[name] > 1) / sum(nbytes for _, nbytes in sizes)


def switched(apps: int, seed: int) -> float:
    """Return the bytes that blocks load, as a share of those of whole models, for requests in a random order."""
    pieces = _pieces(apps)
    order = np.random.default_rng(seed).integers(apps, size=_REQUESTS).tolist()
    whole = [{f"model {at}": sum(model.values())} for at, model in enumerate(pieces)]
    return _loaded(pieces, order) / _loaded(whole, order)


def _loaded(models: Sequence[Mapping[str, int]], order: Sequence[int]) -> int:
    """Return the bytes that come to a device on which the pieces of one model after the other are needed."""
    held: OrderedDict[str, int] = OrderedDict()
    total = 0
    for at in order:
        for name, nbytes in models[at].items():
            if name not in held:
                total += nbytes
            held[name] = nbytes
            held.move_to_end(name)
        while sum(held.values()) > _DEVICE:
            held.popitem(last=False)
    return total


def _pieces(apps: int) -> list[dict[str, int]]:
    """Return the blocks and adapters of each application, with their bytes."""
    family = family_of(paper_apps(apps), Cutting())
    pricing = Pricing(GPUS["A100-80GB"], family)
    return [
        {piece.name: piece.nbytes for piece in pricing.pieces(Stage(model, 0, chain.length))}
        for model, chain in family.chains.items()
    ]


def figure5(seeds: int) -> list[list[str]]:
    """Return Figure 5: a row for each number of applications; of loads the mean over seeds."""
    rows = [["applications", "redundant", "loaded by blocks, of whole models' loads"]]
    for apps in (3, 6, 9, 12, 15, 20, 30):
        loads = float(np.mean([switched(apps, seed) for seed in range(seeds)]))
        rows.append([str(apps), f"{100 * redundant(apps):.1f} %", f"{100 * loads:.1f} %"])
    return rows
