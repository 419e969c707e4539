"""Presets of requests with service-level objectives (QLM)."""

from __future__ import annotations

from runtime.sim.experiments.preset import KEPT_STILL, LOADED, STILL, Case, Preset
from runtime.sim.experiments.scenario import scenario_of


def classes_preset() -> Preset:
    """Interactive requests beside a batch that was there first (QLM, sections 3 and 8), under each order.

    The batch is at once more than the places hold. An interactive request has three times what it takes alone here.
    """
    base = {"provision": "blocks", "max_num_seqs": 32, "placement": "replicate", "control": STILL}
    policies = {
        "qlm": {**base, "order": {"plan": "qlm"}},
        "off": base,
        "fcfs": {**base, "order": {"plan": "fcfs"}},
        "edf": {**base, "order": {"plan": "edf"}},
        "qlm, no eviction": {**base, "order": {"plan": "qlm", "evict": False}},
        "qlm, whole steps": {**base, "order": {"plan": "qlm", "cap_batches": False}},
    }
    cases = []
    for x, share in enumerate((0.05, 0.2)):
        values = {
            "cluster": {"servers": [2]},
            "apps": {"count": 4, "foundations": ["llama-7b"]},
            "asked": {"kind": "poisson", "count": 400, "seconds": 120.0, "prompts": "uniform:64-256", "after": LOADED},
            "classes": {
                "interactive": {"share": share, "slo_ms": 4500, "answers": "64"},
                "batch": {"share": 1 - share, "answers": "uniform:256-768", "within": 0.0},
            },
            "policies": policies,
        }
        cases.append(Case(f"{share:.0%} interactive", scenario_of("qlm-classes", values), x))
    differs = {
        "max_num_seqs": "fewer places than requests of the batch",
        "placement": "every device can run every model at once",
        "order.plan": "the figure compares orders, and `off`, which ships, is one of them",
        **KEPT_STILL,
    }
    title = "Two A100 and four models: interactive requests behind a batch, by order"
    paper = {"section 8": {"interactive requests that meet their objective, below 5 % of all": 0.9}}
    return Preset("qlm-classes", title, tuple(cases), "interactive requests", paper, differs)
