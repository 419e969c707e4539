"""The non-generating routes: models, health, metrics, and the zoo's own routes under /zoo.

The docstrings of the handlers are part of `docs/http.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from runtime.frontend.aliases import ServedAlias
from runtime.frontend.errors import RequestError, unknown_model
from runtime.frontend.served_models import NotServedYet, ServedModel, ServedModels, StoredModel
from runtime.role_config import RoleName
from runtime.server.auth import client_key, is_known
from runtime.server.context import Service
from runtime.server.model_choice import check_model
from runtime.server.model_loading import load_model
from runtime.server.openai.responses import reply
from runtime.server.request_body import read_body
from runtime.server.state_document import ledger_document, state_document
from runtime.tracing.sink import Trace
from zoo.errors import ZooError

_LINES_PER_WRITE = 512
#: Largest body of a change of roles.
_ROLES_BYTES = 1 << 20


class ZooRoutes:
    """The handlers that `app.routes_of` registers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # -- OpenAI --------------------------------------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        """List the models that are served, or are once a request names them."""
        models = self._service.models
        aliases = [_alias_card(models, alias) for alias in models.aliases()]
        cards = [*map(_card, models.all()), *map(_stored_card, models.on_demand()), *aliases]
        key = client_key(request)
        if key is not None and key.models:
            cards = [card for card in cards if card["id"] in key.models]
        return reply({"object": "list", "data": sorted(cards, key=lambda card: str(card["id"]))})

    async def show_model(self, request: Request) -> Response:
        """Show one served model, named in full or by a unique ending, or what an alias stands for."""
        name, models = request.path_params["name"], self._service.models
        if (key := client_key(request)) is not None:
            check_model(self._service, name, key)
        if not models.knows(name) and (alias := models.alias(name)) is not None:
            return reply(_alias_card(models, alias))
        try:
            return reply(_card(models.find(name)))
        except NotServedYet as unserved:
            return reply(_stored_card(unserved.model))

    # -- health --------------------------------------------------------------------------------------------------------

    async def live(self, request: Request) -> Response:
        """The process answers."""
        return reply({"status": "live"})

    async def health(self, request: Request) -> Response:
        """200 only while the driver lives and requests are taken; what is amiss all the same stands in it.

        Without the key of a server that has one: the state alone. Reasons name models, and what an engine said.
        """
        known = is_known(request)
        if not self._service.driver.alive:
            return reply({"status": "dead"} | ({"reason": self._service.driver.death} if known else {}), 503)
        if self._service.gate.closed:
            return reply({"status": "draining"}, 503)
        health = self._service.driver.health()
        return reply(dict(health) if known else {"status": health["status"]})

    async def metrics(self, request: Request) -> Response:
        """All metrics in Prometheus' text format."""
        text = await run_in_threadpool(self._service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # -- the zoo -------------------------------------------------------------------------------------------------------

    async def zoo_models(self, request: Request) -> Response:
        """Every model of the store, and which of them are served."""
        listing = await run_in_threadpool(self._service.source.listing)
        served = {model.name for model in self._service.models.all()}
        return reply({"models": [{**row, "loaded": row["name"] in served} for row in listing]})

    async def zoo_state(self, request: Request) -> Response:
        """Agents, block instances, pages, models and counters, now."""
        return reply(await run_in_threadpool(state_document, self._service))

    async def zoo_ledger(self, request: Request) -> Response:
        """Free pages of each agent, what it lends, and what it borrows, now."""
        return reply(await run_in_threadpool(ledger_document, self._service))

    async def set_roles(self, request: Request) -> Response:
        """Change what agents run, all of those named or none: `{"agent-0": "prefill" | "decode" | "both"}`."""
        try:
            roles = msgspec.json.decode(await read_body(request, _ROLES_BYTES), type=dict[str, RoleName])
        except msgspec.MsgspecError as error:
            raise RequestError(f"The body must give agents their roles: {error}", code="invalid_roles") from None
        if (why := self._service.driver.set_roles(roles)) is not None:
            raise RequestError(f"Nothing was changed: {why}.", status=409, code="roles_refused")
        return reply({"roles": roles})

    async def zoo_trace(self, request: Request) -> Response:
        """The latest events, one JSON object per line; `?limit=` bounds how many."""
        trace = self._service.trace
        if trace is None:
            raise RequestError("No trace is kept; start the server with --trace FILE.", status=404, code="trace_off")
        return StreamingResponse(_lines(trace, _whole(request, "limit")), media_type="application/jsonl")

    async def load(self, request: Request) -> Response:
        """Load a model of the store and serve it. One that is served already is nothing to do."""
        async with self._service.changing:
            name = await run_in_threadpool(self._service.source.resolve, request.path_params["name"])
            if not self._service.models.has(name):
                self._service.models.add(await run_in_threadpool(load_model, self._service, name))
            return reply(_card(self._service.models.find(name)))

    async def unload(self, request: Request) -> Response:
        """Stop serving a model and free what only it used. Waits for its running requests; 409 when they take too
        long.
        """
        async with self._service.changing:
            try:
                model = self._service.models.find(request.path_params["name"])
            except NotServedYet as unserved:
                raise unknown_model(f"The model `{unserved.model.name}` is not served now.") from None
            if pointing := [each.name for each in self._service.models.aliases() if model.name in each.models]:
                raise RequestError(
                    f"{model.name} stays: alias {', '.join(pointing)} points to it.", status=409, code="alias"
                )
            self._service.models.remove(model.name)
            try:
                await run_in_threadpool(self._service.driver.unload, model.name)
            except ZooError:
                if model.name in {spec.name for spec in await run_in_threadpool(self._service.driver.models)}:
                    self._service.models.add(model)
                raise
            return reply({"unloaded": model.name})

    async def pause(self, request: Request) -> Response:
        """A request waits, for a tool or a person: no tokens until it is resumed. `?expected_ms=`: for how long, if
        known.
        """
        expected = _whole(request, "expected_ms")
        nanoseconds = None if expected is None else expected * 1_000_000
        return await self._held(request, True, lambda name: self._service.driver.pause(name, nanoseconds))

    async def resume(self, request: Request) -> Response:
        """A paused request goes on."""
        return await self._held(request, False, self._service.driver.resume)

    async def _held(self, request: Request, paused: bool, act: Callable[[str], int]) -> Response:
        name = request.path_params["id"]
        count = await run_in_threadpool(act, name)
        if not count:
            raise RequestError(
                "No request of that id is running or waiting.", status=404, param="id", code="request_not_found"
            )
        return reply({"id": name, "paused": paused, "sequences": count})


def _whole(request: Request, name: str) -> int | None:
    """Return a query parameter as an integer, None if absent.

    Raises RequestError for anything but a non-negative integer of less than ten digits.
    """
    value = request.query_params.get(name)
    if value is not None and not (value.isascii() and value.isdigit() and len(value) < 10):
        raise RequestError(f"{name} must be a whole number", param=name)
    return None if value is None else int(value)


def _card(model: ServedModel) -> dict[str, Any]:
    """Return OpenAI's model object with vLLM's additional fields."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "blockzoo",
        "root": model.spec.base or model.name,
        "parent": model.spec.base,
        "max_model_len": model.spec.max_model_len,
    }


def _alias_card(models: ServedModels, alias: ServedAlias) -> dict[str, Any]:
    """Return the same for an alias: its root is what it points to, the one with the largest share if several."""
    first = max(alias.targets, key=lambda target: target.share).model
    try:
        card = _card(models.find(first))
    except NotServedYet as unserved:
        card = _stored_card(unserved.model)
    return {**card, "id": alias.name, "created": alias.created, "root": first}


def _stored_card(model: StoredModel) -> dict[str, Any]:
    """Return the same for a model that is not served yet: its context length is not known."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "blockzoo",
        "root": model.base or model.name,
        "parent": model.base,
        "max_model_len": None,
    }


def _lines(trace: Trace, limit: int | None) -> Iterator[str]:
    """Yield the trace's lines in groups: each item of a streamed response costs a switch to a thread and back."""
    lines = iter(trace.lines(limit))
    while lump := "".join(islice(lines, _LINES_PER_WRITE)):
        yield lump
