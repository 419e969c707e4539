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
    """

    reads: CatalogueReads
    sessions: Sessions | None
    service: Service | None
    upkeep: UpkeepJob

    @property
    def keeps(self) -> bool:
        """Whether the store may be verified and collected from the page."""
        return self.sessions is not None or self.service is None

    def close(self) -> None:
        self.upkeep.stop()
        self.reads.close()

    @property
    def frame(self) -> Frame:
        return Frame(self.service is not None, self.sessions is not None)


def page_context(store: Store, api_key: str | None, service: Service | None = None) -> PageContext:
    sessions = None if api_key is None else Sessions(api_key)
    return PageContext(CatalogueReads(store), sessions, service, UpkeepJob(store))
