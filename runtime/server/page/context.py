"""What the page's views share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.server.page.reading import CatalogueReads
from runtime.server.page.rendering import Frame
from runtime.server.page.sessions import Sessions
from runtime.server.page.upkeep_job import UpkeepJob

if TYPE_CHECKING:
    from runtime.server.context import Service
    from zoo.store import Store


@dataclass(frozen=True)
class PageContext:
    """The state of one application's page.

    Fields:
        sessions: The sessions of browsers; None where no key is set.
        service: The server's state; None where a store is only looked at (`zoo ui`).
        upkeep: Audits and collections.
        keeps: Whether they may be started from the page.
    """

    reads: CatalogueReads
    sessions: Sessions | None
    service: Service | None
    upkeep: UpkeepJob
    keeps: bool

    def close(self) -> None:
        self.upkeep.stop()
        self.reads.close()

    @property
    def frame(self) -> Frame:
        return Frame(self.service is not None, self.sessions is not None)


def page_context(store: Store, api_key: str | None, service: Service | None = None, alone: bool = False) -> PageContext:
    """Return the context of a page. `alone`: only this machine reaches it, so the store may be kept without a key."""
    sessions = None if api_key is None else Sessions(api_key)
    return PageContext(CatalogueReads(store), sessions, service, UpkeepJob(store), alone or api_key is not None)
