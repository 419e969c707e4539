"""The keys of the store's clients: what each may do, and what it has used today, by model, with its cost.

Only where there is a key, or a store is looked at on this machine alone: it is for those that run the server. Secrets
are kept nowhere, so there are none to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runtime.server.page.context import PageContext
from runtime.server.page.rendering import explained, html
from zoo.catalog import Reader
from zoo.money import cost_text
from zoo.records import ClientKey, KeyUsage, usage_by_key

#: Keys that are shown at most: valid ones first, then those revoked last. Also lines of keys and models: most tokens.
MOST_SHOWN = 500


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key, with what it has used on the day that is shown, and in its month if that has a bound."""

    key: ClientKey
    used: KeyUsage
    month: KeyUsage | None = None


class KeyViews:
    """The handler of the view of keys."""

    def __init__(self, context: PageContext) -> None:
        self.context = context

    @explained(lambda views: views.context.frame)
    async def show(self, request: Request) -> Response:
        """The keys of clients with their models and limits, the requests, tokens and cost of this day (UTC), and those
        of this month where it is bounded.
        """
        frame, service = self.context.frame, self.context.service
        taken = service is None or service.keys is not None
        if not self.context.keeps:
            return await self.context.reads.apart(lambda: html("keys.html", frame, allowed=False))
        day = datetime.now(UTC).date().isoformat()

        def read(reader: Reader) -> Response:
            keys = reader.keys()
            usage = [used for used in reader.key_usage(day) if used.day == day]
            months = {used.name: used for used in reader.key_usage_of_month(day[: len("2026-01")])}
            lines, priced = lines_of(keys, usage, day, months), bool(reader.prices())
            models = sorted((used for used in usage if used.model), key=lambda used: -used.tokens)
            shown: dict[str, Any] = {
                "lines": lines,
                "count": len(keys),
                "models": models[:MOST_SHOWN],
                "model_count": len(models),
            }
            return html("keys.html", frame, allowed=True, taken=taken, day=day, priced=priced, money=cost_text, **shown)

        return await self.context.reads.run(read)


def lines_of(
    keys: Iterable[ClientKey], usage: Iterable[KeyUsage], day: str, months: Mapping[str, KeyUsage]
) -> list[KeyLine]:
    """Return what is shown of keys: the valid ones by their names, then revoked ones, the latest first.

    `months`: what keys have used in this month, by their names.
    """
    used = usage_by_key(usage)
    found = list(keys)
    valid = sorted((key for key in found if key.revoked is None), key=lambda key: key.name)
    ended = sorted((key for key in found if key.revoked is not None), key=lambda key: str(key.revoked), reverse=True)
    shown, names = [], {key.name for key in valid}
    for key in [*valid, *ended][:MOST_SHOWN]:
        # Usage is recorded by name: what a key of a name used before it was revoked stands with its successor.
        counted = key.revoked is None or key.name not in names
        names.add(key.name)
        nothing = KeyUsage(key.name, day)
        bounded = key.revoked is None and (key.tokens_per_month is not None or key.money_per_month is not None)
        month = months.get(key.name, nothing) if bounded else None
        shown.append(KeyLine(key, used.get(key.name, nothing) if counted else nothing, month))
    return shown
