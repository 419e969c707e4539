"""What the page's views share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.server.page.reading import CatalogueReads
from runtime.server.page.rendering import Frame
from runtime.server.page.sessions import Sessions

if TYPE_CHECKING:
    from runtime.server.context import Service
    from zoo.store import Store


@dataclass(frozen=True)
class PageContext:
    """The state of one application's page.

    Fields:
        sessions: The sessions of browsers; None where no key is set.
        service: The server's state; None where a store is only looked at (`zoo ui`).
    """

    reads: CatalogueReads
    sessions: Sessions | None
    service: Service | None

    @property
    def frame(self) -> Frame:
        return Frame(self.service is not None, self.sessions is not None)


def page_context(store: Store, api_key: str | None, service: Service | None = None) -> PageContext:
    return PageContext(CatalogueReads(store), None if api_key is None else Sessions(api_key), service)
