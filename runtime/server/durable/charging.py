"""What the clients of durable requests are charged: written in the transaction that ends a request, and so once.

    answered                      the prompt, and what was generated
    failed                        the same, as far as it came
    aborted by its client         the same of what the journal has, whether the client has seen it or not
    given up (a dead letter)      nothing: servers died with it
    line of a cancelled or        as aborted, if it had begun and not ended
    expired batch

An attempt that is put down (a full disk, a lost lease, a death) is charged with the request's end, wherever that is.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.queueing.records import DurableRequest
from runtime.queueing.usage import RequestUsage
from runtime.server.context import Service
from runtime.server.request_runner import Prepared, UsedTokens, used_tokens
from runtime.types import TokenEvent
from zoo.keys import principal_of


def usage_of(service: Service, prepared: Prepared) -> RequestUsage | None:
    """Return what a request that ends now has used; None for nothing, and where no key of a client is charged."""
    return _usage(service, prepared.generation.receipt.principal, used_tokens(prepared))


def usage_of_events(service: Service, request: DurableRequest, events: Iterable[TokenEvent]) -> RequestUsage | None:
    """Return the same of a request that cannot be prepared any more, or not on its model: of its journal alone."""
    generated = sum(event.token is not None for event in events)
    return _usage(service, request.principal, UsedTokens(request.model, 0, generated, 0))


def is_charged(service: Service, principal: str) -> bool:
    """Return whether what a principal uses is counted: it is the key of a client."""
    own = service.config.api_key
    return service.keys is not None and principal not in ("", None if own is None else principal_of(own))


def settle(service: Service, used: RequestUsage | None) -> None:
    """Count usage that is in the queue now."""
    if service.keys is not None and used is not None:
        service.keys.settle(used)


def _usage(service: Service, principal: str, used: UsedTokens) -> RequestUsage | None:
    if service.keys is None or not is_charged(service, principal):
        return None
    return service.keys.usage_of(principal, *used)
