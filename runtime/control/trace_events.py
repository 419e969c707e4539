"""Write scheduler and agent events to the trace: one method per event, no-ops without a trace.

This module alone defines the names and fields of events. `n` counts tokens in `batch.insert`, `segment.run` and
`stitch.apply`, pages in `kv.*`, and is the token's index in `token`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

from runtime.chains import Chain, Hop, Path
from runtime.control.sequence import Phase
from runtime.messages import MigrationReady
from runtime.policy.lengths.forecast import LengthForecast
from runtime.policy.migration.two_ended import met_at
from runtime.policy.routing.variants import Dispatch
from runtime.tracing.sink import TraceSink
from runtime.types import FinishReason, ModelSpec, SegmentRun, SequenceRequest, TraceEvent

#: Phases of a request where devices have roles.
RequestPhase = Literal["queued", "prefill", "transfer", "decode", "done"]


@dataclass(frozen=True, slots=True)
class MoveDetails:
    """Describe a migration for the trace.

    Fields:
        front: What the front recomputes from (`policy.migration.recompute_source.Front`).
        reason: Why there is nothing to recompute from; empty if there is.
        upstream: Tokens times components that would have to run again for it.
    """

    number: int
    source: str
    target: str
    front: str
    reason: str
    upstream: int


class TraceEvents:
    """Emit the events of one device, or of the scheduler, to a sink."""

    def __init__(self, sink: TraceSink | None, device: str) -> None:
        self._sink = sink
        self._device = device
        #: Whether there is a sink. Callers on the per-token path check it to avoid the call.
        self.on = sink is not None

    def arrive(self, now: int, request: SequenceRequest) -> None:
        resumed: dict[str, Any] = {"produced": len(request.output)} if request.output else {}
        self._emit(
            now, "arrive", request, n=len(request.prompt), model=request.model, priority=request.priority, **resumed
        )

    def inserted(self, now: int, request: SequenceRequest, phase: Phase, tokens: int) -> None:
        """Record that a sequence joins the batch (`batch.resume` after a preemption). `tokens`: its context length."""
        event = "batch.resume" if phase == "resume" else "batch.insert"
        self._emit(now, event, request, n=tokens, model=request.model)

    def preempted(self, now: int, request: SequenceRequest, produced: int, cause: str) -> None:
        self._emit(now, "batch.preempt", request, n=produced, cause=cause)

    def swapped(
        self, now: int, request: SequenceRequest, event: Literal["kv.swap.out", "kv.swap.in"], tokens: int,
        nbytes: int, swap: float = 0.0, recompute: float = 0.0,
    ) -> None:  # fmt: skip
        """Record K and V that go to host memory or come back.

        `swap`, `recompute`: what both ways were estimated to take, in seconds.
        """
        self._emit(now, event, request, n=tokens, cause="QL-10", nbytes=nbytes, swap=swap, recompute=recompute)

    def removed(self, now: int, request: SequenceRequest, reason: FinishReason, produced: int) -> None:
        self._emit(now, "batch.remove", request, n=produced, cause=reason)

    def shared(self, now: int, request: SequenceRequest, other: str, tokens: int, pages: int) -> None:
        """Record that a sequence starts from the cached pages of another one, so `tokens` tokens are not computed."""
        self._emit(now, "kv.ref", request, n=pages, cause="BL-32", of=other, tokens=tokens)

    def entered(self, now: int, request: SequenceRequest, other: str, tokens: int, layers: int, pages: int) -> None:
        """Record that a sequence starts from the pages of another chain, so `tokens` tokens skip its first layers."""
        self._emit(now, "kv.enter", request, n=pages, cause="UN-15", of=other, tokens=tokens, layers=layers)

    def token(self, now: int, request: SequenceRequest, index: int, token: int) -> None:
        self._emit(now, "token", request, n=index, token=token)

    def sequence_ended(self, now: int, request: SequenceRequest, reason: FinishReason, produced: int) -> None:
        if reason == "abort":
            self._emit(now, "abort", request, n=produced)
        else:
            self._emit(now, "finish", request, n=produced, cause=reason)

    def hops(
        self, now: int, request: SequenceRequest, start: int, tokens: int, path: Path, offered: Collection[int] = ()
    ) -> None:
        """Record a `block.hop` for each assigned hop of a row, in order (BL-13).

        Hops in `offered` are not assigned yet.
        """
        for at, hop in enumerate(path):
            if at not in offered:
                self.hop(now, request, start, tokens, at, hop)

    def hop(self, now: int, request: SequenceRequest, start: int, tokens: int, at: int, hop: Hop) -> None:
        """Record one hop of a row."""
        extra = {"start": start, "hop": at, "to": hop.device, "lo": hop.lo, "hi": hop.hi}
        self._emit(now, "block.hop", request, n=tokens, cause="BL-13", **extra)

    def move(
        self,
        now: int,
        event: str,
        request: SequenceRequest,
        move: MoveDetails,
        last: MigrationReady | None,
        why: str | None,
        cause: str = "BL-16",
    ) -> None:
        """Record that a migration starts, is given up, or succeeds.

        Success emits `kv.recompute` and `kv.copy`, each with its tokens and the reason for its limit, then `kv.meet`
        with both and `met`, the first token that was not recomputed.
        """
        if self._sink is None:
            return
        where: dict[str, Any] = {"move": move.number, "from": move.source, "to": move.target}
        seq, target = request.seq, move.target

        def emit(event: str, nbytes: int | None, n: int | None, extra: dict[str, Any]) -> None:
            told = TraceEvent(
                now, event, request.request, seq, dev=target, n=n, bytes=nbytes, cause=cause, extra=where | extra
            )
            if self._sink is not None:
                self._sink.emit(told)

        if last is None:
            emit(event, None, None, {"front": move.front} if why is None else {"error": why})
            return
        if last.recomputed:
            emit(
                "kv.recompute",
                last.activation_bytes,
                _tokens(last.recomputed),
                {"spans": last.recomputed, "front": move.front},
            )
        if last.copied:
            # Why these tokens were not recomputed: there was nothing to recompute from, or both ends met.
            extra: dict[str, Any] = {"spans": last.copied, "reason": move.reason or last.reason or "both ends met"}
            emit(
                "kv.copy",
                last.nbytes,
                _tokens(last.copied),
                extra | ({"upstream": move.upstream} if move.upstream else {}),
            )
        emit(
            event,
            last.nbytes,
            None,
            {"met": met_at(last.recomputed), "copied": last.copied, "recomputed": last.recomputed},
        )

    def phase(self, now: int, request: SequenceRequest, phase: RequestPhase, devices: Collection[str] = ()) -> None:
        """Record what happens to a sequence from now on, and on which devices, where these have roles (TI-01)."""
        self._emit(now, "phase", request, n=len(devices), cause="TI-01", phase=phase, at=sorted(devices))

    def predicted(self, now: int, request: SequenceRequest, forecast: LengthForecast, made: int) -> None:
        """Record how long an answer that has `made` tokens is predicted to get (TI-10)."""
        self._emit(
            now, "length.predicted", request, n=forecast.bucket, cause="TI-10", edges=forecast.edges,
            mass=forecast.mass, made=made,
        )  # fmt: skip

    def speculation(
        self, now: int, event: str, request: SequenceRequest, device: str, tokens: int, where: dict[str, Any]
    ) -> None:
        """Record that a hop may be predicted, is compared, or counts as a hit or a miss."""
        if self._sink is not None:
            self._sink.emit(
                TraceEvent(now, event, request.request, request.seq, dev=device, n=tokens, cause="BL-25", extra=where)
            )

    def control(self, now: int, event: str, cause: str, device: str, block: str = "", **extra: Any) -> None:
        """Record a decision of a controller, such as `instance.*`, with its cause."""
        if self._sink is not None:
            self._sink.emit(TraceEvent(now, event, dev=device, block=block or None, cause=cause, extra=extra))

    def estimate(self, now: int, kind: str, estimate: float, measured: float) -> None:
        """Record an estimate of a hop, load or move beside what was measured, both in seconds (BL-21)."""
        if self._sink is not None:
            extra = {"of": kind, "seconds": estimate, "measured": measured}
            self._sink.emit(TraceEvent(now, "estimate", dev=self._device, cause="BL-21", extra=extra))

    def model(self, now: int, event: str, spec: ModelSpec) -> None:
        if self._sink is not None:
            self._sink.emit(TraceEvent(now, event, dev=self._device, extra={"model": spec.name}))

    def dispatched(self, now: int, request: SequenceRequest, found: Dispatch) -> None:
        """Record the candidates of an adaptive request with their scores and latencies, and the one chosen (BL-28)."""
        if self._sink is None:
            return
        rated = [
            {"model": each.option.candidate.name, "score": each.option.score, "out": each.out, **asdict(each.latency)}
            for each in found.rated
        ]
        taken = {
            "asked": request.model,
            "model": found.chosen.candidate.name,
            "score": found.chosen.score,
            "rule": found.rule,
        }
        for event, extra in (("dispatch.candidates", {"candidates": rated}), ("dispatch.choose", taken)):
            self._sink.emit(
                TraceEvent(now, event, request.request, request.seq, dev=self._device, cause="BL-28", extra=extra)
            )

    def version(self, now: int, event: str, chain: Chain, error: str = "") -> None:
        """Record that a version of a model is served, failed (`error`), closed to new sequences, or removed (BL-30)."""
        if self._sink is None:
            return
        extra = {
            "model": chain.model,
            "version": chain.version,
            "source": chain.loaded_as,
            **({"error": error} if error else {}),
        }
        self._sink.emit(TraceEvent(now, event, dev=self._device, cause="BL-30", extra=extra))

    def fault(self, now: int, step: int, error: str) -> None:
        if self._sink is not None:
            self._sink.emit(TraceEvent(now, "fault", dev=self._device, extra={"step": step, "error": error}))

    def segments(self, now: int, step: int, runs: tuple[SegmentRun, ...]) -> None:
        if self._sink is None:
            return
        for run in runs:
            extra = {
                "step": step,
                "kind": run.kind,
                "models": run.models,
                "seqs": run.seqs,
                "layers": run.layers,
                "components": run.components,
            }
            event = "stitch.apply" if run.kind == "stitch" else "segment.run"
            self._sink.emit(TraceEvent(now, event, dev=self._device, n=run.tokens, extra=extra))

    def _emit(
        self, now: int, event: str, request: SequenceRequest, *, n: int, cause: str | None = None, **extra: Any
    ) -> None:
        if self._sink is not None:
            told = TraceEvent(now, event, request.request, request.seq, dev=self._device, n=n, cause=cause, extra=extra)
            self._sink.emit(told)


def _tokens(spans: tuple[tuple[int, int], ...]) -> int:
    return sum(hi - lo for lo, hi in spans)
