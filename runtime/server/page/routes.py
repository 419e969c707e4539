"""The page's routes: under `/ui/`, and the list of models at `/`."""

from __future__ import annotations

from starlette.routing import Route

from runtime.server.page.context import PageContext
from runtime.server.page.live import LiveViews
from runtime.server.page.login import Login
from runtime.server.page.views import CatalogueViews


def page_routes(context: PageContext) -> list[Route]:
    """Return the routes, for a server and for `zoo ui` alike."""
    views, live, login = CatalogueViews(context), LiveViews(context), Login(context)
    return [
        Route("/", views.models, methods=["GET"]),
        Route("/ui/zoo.css", views.style, methods=["GET"]),
        Route("/ui/zoo.js", live.script, methods=["GET"]),
        Route("/ui/icon.svg", views.icon, methods=["GET"]),
        Route("/ui/login", login.form, methods=["GET"]),
        Route("/ui/login", login.log_in, methods=["POST"]),
        Route("/ui/logout", login.log_out, methods=["POST"]),
        Route("/ui/lineage", views.lineage, methods=["GET"]),
        Route("/ui/live", live.show, methods=["GET"]),
        Route("/ui/live/events", live.events, methods=["GET"]),
        Route("/ui/models/{name:path}", views.model, methods=["GET"]),
    ]
