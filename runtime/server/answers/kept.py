"""Responses that are kept: on a server with a queue, unless a request says `store: false`.

A kept response is a durable request. Its body is stored with the whole conversation before it, so that neither its run
nor those that continue it need more than one earlier response. Without a queue only those that run in the background
are kept, in memory (`background`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from runtime.frontend.apis.responses import InputItem, ResponseBody
from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.schemas import parse
from runtime.queueing import requests
from runtime.queueing.records import ENDED, DurableRequest, State, StoredAnswer
from runtime.server.answers.responses import response_frame
from runtime.server.context import Service
from runtime.server.openai.responses import dump

if TYPE_CHECKING:
    from runtime.server.durable.store import RequestStore

_NO_QUEUE = "the server runs without --queue"


class SettledBody(NamedTuple):
    """A body that refers to nothing stored; whether its response is kept, and whether it runs in the background."""

    raw: bytes
    kept: bool
    background: bool = False


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A kept response as it is now. `created`: Unix seconds."""

    id: str
    body: ResponseBody
    created: int
    model: str
    state: State
    answer: StoredAnswer | None

    def document(self) -> bytes:
        """Return it as JSON: whole once it has ended, without its output before."""
        if self.answer is not None and self.answer.status == 200:
            return self.answer.document
        if self.answer is None:
            return dump(self._frame("queued" if self.state == "queued" else "in_progress"))
        if self.state == "cancelled":
            return dump(self._frame("cancelled"))
        error = json.loads(self.answer.document)["error"]
        worded = {"code": error["code"] or "server_error", "message": error["message"]}
        return dump({**self._frame("failed"), "error": worded})

    def _frame(self, status: str) -> dict[str, object]:
        return response_frame(self.body, self.id, self.created, self.model, status)


async def settle(service: Service, store: RequestStore | None, raw: bytes, principal: str) -> SettledBody:
    """Return a body with the conversation that it continues, and with what becomes of its response.

    `store`: the queue's requests, None without a queue; `principal`: the owner of what it continues.

    Raises RequestError: 400 for a wrong body and for an earlier response that is not there, 413; StoreError.
    """
    body = await service.in_worker(partial(parse, ResponseBody, raw))
    background = bool(body.background)
    if store is None:
        if body.store and not background:
            raise unsupported("store", _NO_QUEUE)
        if body.previous_response_id is not None:
            raise unsupported("previous_response_id", _NO_QUEUE)
        if background:
            raw = await service.in_worker(partial(_encoded, body.model_copy(update={"store": True})))
        return SettledBody(raw, False, background)
    kept, before = body.store is not False, body.previous_response_id
    changes: dict[str, object] = {"store": kept}
    if before is not None:
        changes["input"] = [*await _conversation(service, store, before, principal), *body.items]
    whole = await service.in_worker(partial(_encoded, body.model_copy(update=changes)))
    if len(whole) > service.config.max_body_bytes:
        message = f"The conversation is larger than {service.config.max_body_bytes} bytes."
        raise RequestError(message, status=413, param="previous_response_id", code="body_too_large")
    return SettledBody(whole, kept, background)


async def is_answered_at_once(service: Service, raw: bytes) -> bool:
    """Return whether a body that has been accepted asks for a response in the background, and for no stream of it."""
    if b"background" not in raw:  # bodies may be large
        return False
    body = await service.in_worker(partial(parse, ResponseBody, raw))
    return bool(body.background) and not body.stream


async def find_kept(service: Service, store: RequestStore, name: str, principal: str) -> KeptResponse | None:
    """Return a kept response of a principal as it is now. Raises StoreError."""
    found = await find_response(service, store, name, principal)
    return None if found is None else await kept_now(store, *found)


async def kept_now(store: RequestStore, found: DurableRequest, body: ResponseBody) -> KeptResponse:
    """Return a durable request as the response that it is. Raises StoreError."""
    answer = await store.answer(found.id) if found.state in ENDED else None
    return KeptResponse(found.id, body, found.created // 10**9, found.model, found.state, answer)


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
