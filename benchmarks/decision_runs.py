"""The runs that `benchmarks.same_decisions` records: presets of `zoo simulate`, a few seconds each, and scenarios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Run -> options of `zoo simulate`. The trace covers only the first case and policy, so further policies have their own
#: runs.
RUNS: Mapping[str, tuple[str, ...]] = {
    "blockllm": ("--preset", "blockllm", "--requests", "60"),
    "blockllm-load": ("--preset", "blockllm-load", "--requests", "40"),
    "blockllm-apps": ("--preset", "blockllm-apps", "--requests", "60"),
    "blockllm-table2": ("--preset", "blockllm-table2", "--requests", "40"),
    "blockllm-kv": ("--preset", "blockllm-kv", "--requests", "80"),
    "blockllm-kv.recompute": ("--preset", "blockllm-kv", "--requests", "60", "--policy", "recompute"),
    "blockllm-kv.least-busy": ("--preset", "blockllm-kv", "--requests", "60", "--policy", "least-busy"),
    "blockllm-kv.strict": ("--preset", "blockllm-kv", "--requests", "60", "--policy", "strict"),
    "blockllm-placement": ("--preset", "blockllm-placement", "--requests", "40"),
    "blockllm-placement.frag-min": ("--preset", "blockllm-placement", "--requests", "40", "--policy", "frag-min"),
    "blockllm-placement.mended": ("--preset", "blockllm-placement", "--requests", "40", "--policy", "mended"),
    "blockllm-adaptive": ("--preset", "blockllm-adaptive", "--requests", "60"),
    "blockllm-speculation": ("--preset", "blockllm-speculation", "--requests", "16"),
    "blockllm-speculation.exact": ("--preset", "blockllm-speculation", "--requests", "16", "--policy", "exact"),
    "blockllm-accuracy": ("--preset", "blockllm-accuracy", "--requests", "1000"),
    "scale": ("--preset", "scale", "--requests", "2000", "--devices", "40"),
    "full-device": ("--preset", "full-device", "--requests", "256"),
}
#: What no preset covers: broadcast dispatch between agents; and batch limits per block on devices with so few pages
#: that sequences are preempted, with migrations that use kept block inputs.
SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "broadcast": {
        "cluster": {"servers": [2, 2, 2], "gpu": "A10", "weights": 0.45},
        "apps": {"count": 1, "foundations": ["llama-7b"]},
        "asked": {"count": 80, "seconds": 20.0, "prompts": "uniform:8-64", "answers": "uniform:2-24"},
        "policies": {
            "blocks": {"placement": "replicate", "dispatch": "broadcast", "page_layers": 32, "page_tokens": 128}
        },
    },
    "short-of-pages": {
        "cluster": {"servers": [2, 2], "gpu": "A10", "weights": 0.9},
        "apps": {"count": 3, "foundations": ["llama-7b"]},
        "asked": {"count": 80, "seconds": 5.0},
        "policies": {
            "blocks": {
                "placement": "partition", "page_layers": 8, "max_batch_per_block": 8, "activation_cache_bytes": 1 << 28,
                "prefix_caching": "cached",
                "control": {"rebalance": "owner", "scaling": True, "interval_ms": 200, "rearrange_interval_ms": 2000},
            }
        },
    },
}  # fmt: skip
