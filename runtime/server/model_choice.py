"""Which model serves a request: the one it names, or, where the request allows it, that model's rewriting (`zoo
serve --serve-deltas`); or that model left behind so many of its layers, where the request asks for that (`zoo serve
--early-exit`, BL-30).

With the profiles of both chains stored the policy decides by the load of the moment; without, the rewriting is taken
wherever it is
served. Either way the trace tells: `dispatch.candidates` with the terms of both, `dispatch.choose` with the outcome
(BL-21).
"""

from __future__ import annotations

import time
from dataclasses import asdict

from runtime.frontend.assemble import Receipt
from runtime.frontend.errors import unsupported
from runtime.frontend.schemas import ChatBody, CompletionBody
from runtime.frontend.served_models import ServedModel
from runtime.policy.routing.latency import Choice
from runtime.policy.routing.rewriting import Side, decide, rows_beside
from runtime.server.context import Service
from runtime.types import TraceEvent

_CAUSE = "BL-21"
#: Bytes of a body per token of its prompt, about: the tokens are counted only when it is known for whom.
_BYTES_PER_TOKEN = 4


def model_for(service: Service, body: CompletionBody | ChatBody, nbytes: int, receipt: Receipt) -> ServedModel:
    """The model that a request gets. `nbytes`: of its body. Raises RequestError: 404 for a name that is not served, 400
    for an exit that is not."""
    model = service.models.find(body.model)
    if body.early_exit is not None:
        return _exit(service, model, body.early_exit)
    return _exact_or_not(service, model, bool(body.adaptive), nbytes, receipt)


def _exit(service: Service, model: ServedModel, layers: int) -> ServedModel:
    if not service.config.early_exit:
        raise unsupported("early_exit", "this server runs without --early-exit")
    found = service.models.exit_of(model, layers)
    if found is None:
        known = ", ".join(map(str, service.models.exits_of(model))) or "none"
        raise unsupported(
            "early_exit", f"{model.name} is not served up to layer {layers} only; its exits here: {known}"
        )
    return found


def _exact_or_not(service: Service, model: ServedModel, adaptive: bool, nbytes: int, receipt: Receipt) -> ServedModel:
    """Itself, or its rewriting where that may be."""
    stand_in = service.models.stand_in_of(model) if adaptive else None
    if stand_in is None:
        return model
    choice = _decided(service, model, stand_in, max(1, nbytes // _BYTES_PER_TOKEN))
    taken = model if choice is not None and choice.chosen.name == model.name else stand_in
    _tell(service, receipt, (model.name, stand_in.name), taken.name, choice)
    return taken


def _decided(service: Service, model: ServedModel, stand_in: ServedModel, context: int) -> Choice | None:
    """What the profiles say; None where one of the two was not measured."""
    if model.profile is None or stand_in.profile is None:
        return None
    rows = {load.model: load.running + load.waiting for load in service.driver.state().models}
    specs = service.driver.models()
    exact = Side(model.name, model.profile, rows_beside(model.name, specs, rows))
    rewriting = Side(stand_in.name, stand_in.profile, rows_beside(stand_in.name, specs, rows))
    return decide(exact, rewriting, min(context, model.spec.max_model_len))


def _tell(service: Service, receipt: Receipt, names: tuple[str, str], taken: str, choice: Choice | None) -> None:
    """`names`: of the model that was asked for and of its rewriting, in the order of the choice's terms."""
    if service.trace is None:
        return
    now = time.monotonic_ns()
    cause = None if choice is None else _CAUSE
    if choice is not None:
        terms = [{"model": name, **asdict(latency)} for name, latency in zip(names, choice.latencies, strict=True)]
        service.trace.emit(TraceEvent(now, "dispatch.candidates", receipt.id, cause=cause, extra={"candidates": terms}))
    service.trace.emit(
        TraceEvent(now, "dispatch.choose", receipt.id, cause=cause, extra={"asked": names[0], "model": taken})
    )
