"""Tells the trace what an agent does: one method per event of mechanisms 0.3, nothing at all without a trace.

Contract: names and fields of events are decided here and nowhere else. `n` counts tokens in `prefill.chunk`, `batch.insert`,
`segment.run` and `stitch.apply`, pages in `kv.*`, and is a token's index in `token`. It changes nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from runtime.messages import Moved
from runtime.policy.batching import Phase
from runtime.policy.dispatch import Dispatch
from runtime.policy.twoended import met_at
from runtime.stages import Chain, Hop, Path
from runtime.trace import TraceSink
from runtime.types import FinishReason, ModelSpec, SegmentRun, SequenceRequest, TraceEvent


class Narrator:
    def __init__(self, sink: TraceSink | None, device: str) -> None:
        self._sink = sink
        self._device = device
        #: Whether anybody listens: spares whoever tells of every token the call.
        self.on = sink is not None

    def arrive(self, now: int, request: SequenceRequest) -> None:
        self._tell(now, "arrive", request, n=len(request.prompt), model=request.model, priority=request.priority)

    def inserted(self, now: int, request: SequenceRequest, phase: Phase, tokens: int) -> None:
        """A sequence joins the batch: `batch.resume` after a preemption. `tokens`: its context so far."""
        event = "batch.resume" if phase == "resume" else "batch.insert"
        self._tell(now, event, request, n=tokens, model=request.model)

    def preempted(self, now: int, request: SequenceRequest, produced: int) -> None:
        self._tell(now, "batch.preempt", request, n=produced, cause="pages")

    def removed(self, now: int, request: SequenceRequest, reason: FinishReason, produced: int) -> None:
        self._tell(now, "batch.remove", request, n=produced, cause=reason)

    def chunk(self, now: int, request: SequenceRequest, phase: Phase, start: int, tokens: int, step: int) -> None:
        self._tell(now, "prefill.chunk", request, n=tokens, cause=phase, start=start, step=step)

    def allocated(self, now: int, request: SequenceRequest, pages: int, free: int) -> None:
        """`free`: pages that are left, so that conservation can be checked from outside."""
        self._tell(now, "kv.alloc", request, n=pages, free=free)

    def shared(self, now: int, request: SequenceRequest, other: str, tokens: int, pages: int) -> None:
        """A sequence begins as another that is there: so many tokens of it are not computed."""
        self._tell(now, "kv.ref", request, n=pages, cause="BL-32", of=other, tokens=tokens)

    def freed(self, now: int, request: SequenceRequest, pages: int, free: int) -> None:
        self._tell(now, "kv.free", request, n=pages, free=free)

    def token(self, now: int, request: SequenceRequest, index: int, token: int) -> None:
        self._tell(now, "token", request, n=index, token=token)

    def ended(self, now: int, request: SequenceRequest, reason: FinishReason, produced: int) -> None:
        if reason == "abort":
            self._tell(now, "abort", request, n=produced)
        else:
            self._tell(now, "finish", request, n=produced, cause=reason)

    def hops(self, now: int, request: SequenceRequest, start: int, tokens: int, path: Path, offered: Collection[int] = ()) -> None:
        """A row sets out: one `block.hop` for each device that it will pass, in order (BL-13), but for hops that nobody has yet."""
        for at, hop in enumerate(path):
            if at not in offered:
                self.hop(now, request, start, tokens, at, hop)

    def hop(self, now: int, request: SequenceRequest, start: int, tokens: int, at: int, hop: Hop) -> None:
        """One of them."""
        extra = {"start": start, "hop": at, "to": hop.device, "lo": hop.lo, "hi": hop.hi}
        self._tell(now, "block.hop", request, n=tokens, cause="BL-13", **extra)

    def move(
        self, now: int, event: str, request: SequenceRequest, number: int, source: str, target: str, last: Moved | None, why: str | None
    ) -> None:
        """A migration begins, ends well (`kv.meet`: `met`, the first token that was not recomputed, and the spans of either kind), or is
        given up."""
        if self._sink is None:
            return
        extra: dict[str, Any] = {"move": number, "from": source, "to": target}
        if last is not None:
            extra |= {"met": met_at(last.recomputed), "copied": last.copied, "recomputed": last.recomputed}
        if why is not None:
            extra["error"] = why
        nbytes = None if last is None else last.nbytes
        self._sink.emit(TraceEvent(now, event, request.request, request.seq, dev=target, bytes=nbytes, cause="BL-16", extra=extra))

    def speculation(self, now: int, event: str, request: SequenceRequest, device: str, tokens: int, where: dict[str, Any]) -> None:
        """A hop of a sequence may be predicted, is compared, or counts as predicted well or badly."""
        if self._sink is not None:
            self._sink.emit(TraceEvent(now, event, request.request, request.seq, dev=device, n=tokens, cause="BL-25", extra=where))

    def control(self, now: int, event: str, cause: str, device: str, block: str = "", **extra: Any) -> None:
        """What was decided by the clock: instances that come and go (`instance.*`), and why."""
        if self._sink is not None:
            self._sink.emit(TraceEvent(now, event, dev=device, block=block or None, cause=cause, extra=extra))

    def model(self, now: int, event: str, spec: ModelSpec) -> None:
        if self._sink is not None:
            self._sink.emit(TraceEvent(now, event, dev=self._device, extra={"model": spec.name}))

    def dispatched(self, now: int, request: SequenceRequest, found: Dispatch) -> None:
        """An adaptive request could go several ways (BL-28): the terms of all, and the one that was taken."""
        if self._sink is None:
            return
        rated = [
            {"model": each.option.candidate.name, "score": each.option.score, "out": each.out, **asdict(each.latency)}
            for each in found.rated
        ]
        taken = {"asked": request.model, "model": found.chosen.candidate.name, "score": found.chosen.score, "rule": found.rule}
        for event, extra in (("dispatch.candidates", {"candidates": rated}), ("dispatch.choose", taken)):
            self._sink.emit(TraceEvent(now, event, request.request, request.seq, dev=self._device, cause="BL-28", extra=extra))

    def version(self, now: int, event: str, chain: Chain, error: str = "") -> None:
        """A version of a model is served, could not be (`error`), gets no newcomers any more, or is gone (BL-30)."""
        if self._sink is None:
            return
        extra = {"model": chain.model, "version": chain.version, "source": chain.loaded_as, **({"error": error} if error else {})}
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

    def _tell(self, now: int, event: str, request: SequenceRequest, *, n: int, cause: str | None = None, **extra: Any) -> None:
        if self._sink is not None:
            told = TraceEvent(now, event, request.request, request.seq, dev=self._device, n=n, cause=cause, extra=extra)
            self._sink.emit(told)
