"""The keys of the store's clients: what each may do, and what it has used today.

Only where there is a key, or a store is looked at on this machine alone: it is for those that run the server. Secrets
are kept nowhere, so there are none to show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from runtime.server.page.context import PageContext
from runtime.server.page.rendering import explained, html
from zoo.catalog import Reader
from zoo.records import ClientKey, KeyUsage

#: Keys that are shown at most: valid ones first, then those revoked last.
MOST_SHOWN = 500


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key, with what it has used on the day that is shown."""

    key: ClientKey
    used: KeyUsage


class KeyViews:
    """The handler of the view of keys."""

    def __init__(self, context: PageContext) -> None:
        self.context = context

    @explained(lambda views: views.context.frame)
    async def show(self, request: Request) -> Response:
        """The keys of clients with their models and limits, and the requests and tokens of this day (UTC)."""
        frame, service = self.context.frame, self.context.service
        taken = service is None or service.keys is not None
        if not self.context.keeps:
            return await self.context.reads.apart(lambda: html("keys.html", frame, allowed=False))
        day = datetime.now(UTC).date().isoformat()

        def read(reader: Reader) -> Response:
            keys = reader.keys()
            lines = lines_of(keys, reader.key_usage(day), day)
            return html("keys.html", frame, allowed=True, taken=taken, day=day, lines=lines, count=len(keys))

        return await self.context.reads.run(read)


def lines_of(keys: Iterable[ClientKey], usage: Iterable[KeyUsage], day: str) -> list[KeyLine]:
    """Return what is shown of keys: the valid ones by their names, then revoked ones, the latest first."""
    used = {each.name: each for each in usage if each.day == day}
    found = list(keys)
    valid = sorted((key for key in found if key.revoked is None), key=lambda key: key.name)
    ended = sorted((key for key in found if key.revoked is not None), key=lambda key: str(key.revoked), reverse=True)
    shown, names = [], {key.name for key in valid}
    for key in [*valid, *ended][:MOST_SHOWN]:
        # Usage is recorded by name: what a key of a name used before it was revoked stands with its successor.
        counted = key.revoked is None or key.name not in names
        names.add(key.name)
        shown.append(KeyLine(key, used.get(key.name, KeyUsage(key.name, day)) if counted else KeyUsage(key.name, day)))
    return shown
