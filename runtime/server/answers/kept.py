"""Responses that are kept: on a server with a queue, unless a request says `store: false`.

A kept response is a durable request. Its body is stored with the whole conversation before it, so that neither its run
nor those that continue it need more than one earlier response.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from runtime.frontend.apis.responses import InputItem, ResponseBody
from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.schemas import parse
from runtime.queueing import requests
from runtime.queueing.records import ENDED, DurableRequest
from runtime.server.context import Service

if TYPE_CHECKING:
    from runtime.server.durable.store import RequestStore

_NO_QUEUE = "the server runs without --queue"


class SettledBody(NamedTuple):
    """A body that refers to nothing stored, and whether its response is kept."""

    raw: bytes
    kept: bool


async def settle(service: Service, store: RequestStore | None, raw: bytes, principal: str) -> SettledBody:
    """Return a body with the conversation that it continues, and with what becomes of its response.

    `store`: the queue's requests, None without a queue; `principal`: the owner of what it continues.

    Raises RequestError: 400 for a wrong body and for an earlier response that is not there, 413; StoreError.
    """
    body = await service.in_worker(partial(parse, ResponseBody, raw))
    if store is None:
        if body.store or body.previous_response_id is not None:
            raise unsupported("store" if body.store else "previous_response_id", _NO_QUEUE)
        return SettledBody(raw, False)
    kept, before = body.store is not False, body.previous_response_id
    changes: dict[str, object] = {"store": kept}
    if before is not None:
        changes["input"] = [*await _conversation(service, store, before, principal), *body.items]
    whole = await service.in_worker(partial(_encoded, body.model_copy(update=changes)))
    if len(whole) > service.config.max_body_bytes:
        message = f"The conversation is larger than {service.config.max_body_bytes} bytes."
        raise RequestError(message, status=413, param="previous_response_id", code="body_too_large")
    return SettledBody(whole, kept)


async def find_response(
    service: Service, store: RequestStore, name: str, principal: str
) -> tuple[DurableRequest, ResponseBody] | None:
    """Return a kept response of a principal, with its body. Raises StoreError."""
    found = await store.read(partial(requests.get, request=name))
    if found is None or found.kind != "response" or found.principal != principal:
        return None
    if found.body is None:  # a line of a batch
        return None
    body = await service.in_worker(partial(parse, ResponseBody, found.body))
    return (found, body) if body.store else None


async def _conversation(service: Service, store: RequestStore, name: str, principal: str) -> list[InputItem]:
    """Return the items of a conversation up to the end of a kept response."""
    found = await find_response(service, store, name, principal)
    if found is None:
        raise _not_found("There is no response of that id.")
    request, body = found
    answer = await store.answer(name) if request.state in ENDED else None
    if answer is None or answer.status != 200:
        raise _not_found("The response of that id has no answer.")
    output = json.loads(answer.document)["output"]
    return [*body.items, *map(InputItem.model_validate, output)]


def _not_found(message: str) -> RequestError:
    return RequestError(message, param="previous_response_id", code="previous_response_not_found")


def _encoded(body: ResponseBody) -> bytes:
    return body.model_dump_json(exclude_unset=True, by_alias=True).encode()
