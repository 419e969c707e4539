"""Turn a run into a document: latencies, throughput, utilisation, memory, communication; and two runs into ratios.

- Throughput: generated tokens over the time from the first arrival to the last end. `throughput_90`: only until nine
  tenths of them are generated, so that it does not depend on the longest answers.
- `classes`: with classes of requests, the share of each that ended, or had its first token, within its objective.
- `in_system`: mean number of requests in the system, by Little's law.
- Utilisation: share of the time in which a device runs a step, as the mean of all devices.
- `kernels`: share of the time in which a kernel runs, which would be SM efficiency if each kernel filled the device.
  Launches that the device waits for and the engine's own work between steps do not count.

The share of useful floating-point operations is proportional to tokens per second, because they are those of the
requests. Everything except `real` is in virtual time and the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from runtime.sim.results.played import Played
from runtime.sim.workload.requests import Demand

_PERCENTS = {"p50": 50, "p95": 95, "p99": 99}
#: The service-level objective: seconds until the first token, and per further token.
FIRST_S, TOKEN_S = 5.0, 0.1
#: A load is sustained if 95 % of the requests end within so many seconds.
SUSTAINED_S = 60.0
#: Points of a curve over time.
_POINTS = 200


def document_of(played: Played) -> dict[str, Any]:
    """Return the document of a run: times in seconds, sizes in bytes."""
    ledger, network = played.ledger, played.network
    arrived, first, ended = (
        np.array(column, dtype=np.int64) for column in (ledger.arrived, ledger.first, ledger.ended)
    )
    tokens = np.array(ledger.tokens, dtype=np.int64)
    answered = first > 0
    begin = int(arrived.min()) if len(arrived) else 0
    seconds = max(int(ended.max(initial=0)) - begin, 1) / 1e9
    more = answered & (tokens > 1)
    return {
        "requests": len(arrived),
        "completed": int(answered.sum()),
        "errors": dict(sorted(ledger.errors.items())),
        "events": played.events,
        "virtual_seconds": seconds,
        "in_system": float((ended - arrived)[answered].sum() / 1e9 / seconds),
        "slo": _slo(arrived, first, ended, tokens, seconds),
        "latency": _spread((ended - arrived)[answered] / 1e9),
        "ttft": _spread((first - arrived)[answered] / 1e9),
        "tpot": _spread((ended - first)[more] / 1e9 / (tokens[more] - 1)),
        "tokens": int(tokens.sum()),
        "throughput_tokens": float(tokens.sum() / seconds),
        "throughput_90": _until(played, 0.9),
        "utilisation": float(np.mean(list(played.busy.values())) / 1e9 / seconds),
        "kernels": (sum(played.busy.values()) - played.launching) / len(played.busy) / 1e9 / seconds,
        "counts": dict(played.counts),
        "communication_bytes": network.between.nbytes + network.inside.nbytes,
        "communication": {
            name: {"messages": each.messages, "bytes": each.nbytes, "seconds": each.ns / 1e9}
            for name, each in (("between", network.between), ("inside", network.inside))
        },
        "parts": _parts(played),
        "memory": _memory(played),
        "adapted": len(ledger.served),
        "loads": {
            "count": ledger.loads,
            "bytes": ledger.load_bytes,
            "disk_bytes": played.disk_bytes,
            "seconds": ledger.load_ns / 1e9,
        },
        "steps": played.steps,
        "curves": _curves(played, (ended - arrived)[answered] / 1e9),
        "real": _real(played),
    }


def _parts(played: Played) -> dict[str, float]:
    """Return the shares of computing and of links in their sum: for one batch, its latency by part (Figure 7)."""
    network = played.network
    ns = {
        "compute": sum(played.busy.values()),
        "between_servers": network.between.ns,
        "inside_servers": network.inside.ns,
    }
    total = max(sum(ns.values()), 1)
    return {name: each / total for name, each in ns.items()}


def _slo(arrived: Any, first: Any, ended: Any, tokens: Any, seconds: float) -> dict[str, float]:
    """Return the share of requests with an answer in time, those per second (goodput), and the share that ends soon."""
    answered = first > 0
    more = np.maximum(tokens - 1, 1)
    good = answered & (first - arrived <= FIRST_S * 1e9) & ((ended - first) / more <= TOKEN_S * 1e9)
    soon = answered & (ended - arrived <= SUSTAINED_S * 1e9)
    return {
        "met": float(good.mean()) if len(good) else 0.0,
        "goodput": float(good.sum() / seconds),
        "soon": float(soon.mean()) if len(soon) else 0.0,
    }


def _until(played: Played, share: float) -> float:
    """Return tokens per second until this share of them was generated, interpolated between ticks."""
    ledger = played.ledger
    begin = min(ledger.arrived, default=0)
    samples = [each for each in ledger.samples if each.at > begin]
    at, made = (
        [0, *(each.at - begin for each in samples), played.end - begin],
        [0, *(each.tokens for each in samples), ledger.made],
    )
    when = float(np.interp(share * ledger.made, made, at))
    return share * ledger.made / when * 1e9 if when else 0.0


def _curves(played: Played, latencies: Any) -> dict[str, list[Any]]:
    """Return data for plots: percentiles of latency, and busy devices over time in a limited number of points."""
    points, before, busy = [], 0, 0
    samples = played.ledger.samples
    for sample in samples[:: max(1, len(samples) // _POINTS)]:
        share = (sample.busy - busy) / max(1, sample.at - before) / len(played.busy)
        points.append([round(sample.at / 1e9, 3), round(share, 4), sample.alive])
        before, busy = sample.at, sample.busy
    percentiles = np.percentile(latencies, np.arange(101)) if len(latencies) else []
    return {"latency_percentiles": [round(float(value), 6) for value in percentiles], "over_time": points}


def accuracy_of(played: Played, accuracy: Mapping[str, float], pieces: int = 10) -> dict[str, Any]:
    """Return the mean accuracy of answers: over all requests, and over pieces of the time, ordered by arrival rate.

    `accuracy`: by model.
    """
    ledger = played.ledger
    found = np.array([accuracy[ledger.served.get(number, model)] for number, model in enumerate(ledger.model)])
    arrived = np.array(ledger.arrived) / 1e9
    length = max(float(arrived.max(initial=0.0)), 1e-9) / pieces
    piece = np.minimum((arrived / length).astype(np.int64), pieces - 1)
    rates = [
        [float((piece == at).sum() / length), float(found[piece == at].mean())]
        for at in range(pieces)
        if (piece == at).any()
    ]
    return {"mean": float(found.mean()), "by_rate": sorted(rates)}


def classes_of(played: Played, demand: Demand) -> dict[str, Any]:
    """Return the attainment and latencies of each class of requests, under `classes`; nothing without classes."""
    if demand.kind is None:
        return {}
    ledger = played.ledger
    arrived, first, ended = (np.array(column) for column in (ledger.arrived, ledger.first, ledger.ended))
    took, answered, found = (ended - arrived) / 1e9, (first > 0) & (ended > 0), {}
    for number, each in enumerate(demand.classes):
        mine = demand.kind[: len(arrived)] == number
        found[each.name] = {"requests": int(mine.sum()), "latency": _spread(took[mine & answered])}
        objective = each.ttft_slo_ms if each.slo_ms is None else each.slo_ms
        if objective is not None and mine.any():
            judged = took if each.slo_ms is not None else (first - arrived) / 1e9
            found[each.name]["met"] = float((answered & (judged <= objective / 1e3))[mine].mean())
    return {"classes": found}


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Return ours over theirs for what the paper compares."""
    pairs = {
        "latency.mean": (ours["latency"]["mean"], theirs["latency"]["mean"]),
        "latency.p50": (ours["latency"]["p50"], theirs["latency"]["p50"]),
        "latency.p95": (ours["latency"]["p95"], theirs["latency"]["p95"]),
        "throughput": (ours["throughput_tokens"], theirs["throughput_tokens"]),
        "throughput, until 90 %": (ours["throughput_90"], theirs["throughput_90"]),
        "utilisation": (ours["utilisation"], theirs["utilisation"]),
        "kernels": (ours["kernels"], theirs["kernels"]),
        "communication": (ours["communication_bytes"], theirs["communication_bytes"]),
        "between servers": (ours["communication"]["between"]["bytes"], theirs["communication"]["between"]["bytes"]),
        "weights": (ours["memory"]["weights_mean"], theirs["memory"]["weights_mean"]),
        "kv": (ours["memory"]["kv_mean"], theirs["memory"]["kv_mean"]),
    }
    return {name: mine / other for name, (mine, other) in pairs.items() if other}


def _spread(values: Any) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys((*_PERCENTS, "mean", "max"), 0.0)
    found = {name: float(np.percentile(values, percent)) for name, percent in _PERCENTS.items()}
    return found | {"mean": float(np.mean(values)), "max": float(np.max(values))}


def _memory(played: Played) -> dict[str, float]:
    """Return the memory of all devices together while requests were running."""
    samples = [sample for sample in played.ledger.samples if sample.alive] or played.ledger.samples
    weights, kv = [sample.weights for sample in samples] or [0], [sample.kv for sample in samples] or [0]
    return {
        "weights_mean": float(np.mean(weights)), "weights_max": float(max(weights)),
        "kv_mean": float(np.mean(kv)), "kv_max": float(max(kv)),
    }  # fmt: skip


def _real(played: Played) -> dict[str, float]:
    cost = played.cost
    return {
        "seconds": played.seconds,
        "processor_seconds": played.used,
        "scheduler_seconds": cost.seconds,
        "scheduler_calls": cost.calls,
        "scheduler_us_per_call": cost.seconds / max(1, cost.calls) * 1e6,
        "scheduler_us_per_step": cost.seconds / max(1, played.steps) * 1e6,
        "scheduler_slowest_ms": cost.slowest * 1e3,
    }
