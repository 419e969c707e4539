"""What the benchmark of simulated figures computes itself: medians over seeds, ratios, and no run made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import figures as simulated
from benchmarks.simulated.figures import ablations, documents, each, greatest, over_seeds, overall, ratio, spread


def _run(latency: float, tokens: float, bytes_: int) -> dict[str, Any]:
    return {
        "latency": {"mean": latency, "p50": latency, "p95": 2 * latency},
        "throughput_tokens": tokens, "throughput_90": tokens, "utilisation": 0.5, "kernels": 0.4,
        "communication_bytes": bytes_, "communication": {"between": {"bytes": bytes_}},
        "memory": {"weights_mean": 10.0, "kv_mean": 1.0},
    }  # fmt: skip


def _document(ours: float, theirs: float, bytes_: int = 0) -> dict[str, Any]:
    policies = {"blocks": _run(ours, 100.0, bytes_), "pm": _run(theirs, 50.0, 30)}
    return {"preset": "p", "cases": [{"label": "", "x": 0.0, "policies": policies}]}


def test_a_spread_is_the_median_with_the_least_and_the_greatest():
    assert spread([0.5, 2.0, 1.25]) == "1.25 [.50, 2.00]"
    assert spread([0.98]) == ".98" and spread([1234.0, 1234.0], 0) == "1,234"
    assert spread([]) == "–"


def test_ours_over_theirs_is_the_median_of_each_seeds_ratio():
    runs = [_document(1.0, 2.0), _document(3.0, 2.0), _document(2.0, 2.0)]
    row = overall(runs, ["mean", "tokens/s"])[0]
    assert row == ["p", "pm", "1.00 [.50, 1.50]", "2.00"]


def test_an_ablation_is_theirs_over_ours_and_has_no_ratio_where_ours_moved_nothing():
    head, row = ablations([_document(1.0, 2.0)])
    assert dict(zip(head, row, strict=True)) | {"p50": "2.00", "tokens/s": ".50", "bytes": "–"} == dict(
        zip(head, row, strict=True)
    )
    assert over_seeds([_document(1.0, 2.0), _document(1.0, 2.0, 10)], 0, ratio("communication", "pm", "blocks")) == [
        3.0
    ]


def test_each_policy_has_a_row():
    rows = each([_document(1.0, 2.0), _document(4.0, 2.0)], {"p95": (lambda run: run["latency"]["p95"], 1)})
    assert rows == [["case", "policy", "p95"], ["", "blocks", "5.0 [2.0, 8.0]"], ["", "pm", "4.0"]]


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []

    def run_study(preset: Any, seed: int) -> dict[str, Any]:
        ran.append(seed)
        return {"seed": seed}

    monkeypatch.setattr(simulated, "run_study", run_study)
    (tmp_path / "blockllm-0.json").write_text(json.dumps({"seed": 0}))
    assert documents(tmp_path, "blockllm", 2) == documents(tmp_path, "blockllm", 2) == [{"seed": 0}, {"seed": 1}]
    assert ran == [1]


def test_the_greatest_load_is_the_last_one_that_meets_its_limit():
    def case(x: float, soon: float, met: float) -> dict[str, Any]:
        slo = {"soon": soon, "met": met, "goodput": x / 10}
        return {"x": x, "policies": {"blocks": {"throughput_tokens": 100 * x, "slo": slo}}}

    runs = [{"cases": [case(4, 1.0, 0.95), case(16, 0.96, 0.5), case(32, 0.5, 0.1)]}]
    assert greatest(runs)[1] == ["blocks", "16", "1,600", "4", ".40"]
