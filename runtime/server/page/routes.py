"""The page's routes: under `/ui/`, and the list of models at `/`."""

from __future__ import annotations

from starlette.routing import Route

from runtime.server.page.context import PageContext
from runtime.server.page.views.catalogue import CatalogueViews
from runtime.server.page.views.comparison import ComparisonViews
from runtime.server.page.views.keys import KeyViews
from runtime.server.page.views.live import LiveViews
from runtime.server.page.views.login import Login
from runtime.server.page.views.patterns import PatternViews
from runtime.server.page.views.playground import PlaygroundViews
from runtime.server.page.views.upkeep import UpkeepViews


def page_routes(context: PageContext) -> list[Route]:
    """Return the routes, for a server and for `zoo ui` alike."""
    views, live, login, comparison = (
        CatalogueViews(context),
        LiveViews(context),
        Login(context),
        ComparisonViews(context),
    )
    upkeep = UpkeepViews(context)
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
        Route("/ui/compare", comparison.show, methods=["GET"]),
        Route("/ui/compare/distances", comparison.measure, methods=["POST"]),
        Route("/ui/playground", PlaygroundViews(context).show, methods=["GET"]),
        Route("/ui/keys", KeyViews(context).show, methods=["GET"]),
        Route("/ui/upkeep", upkeep.show, methods=["GET"]),
        Route("/ui/upkeep/state", upkeep.state, methods=["GET"]),
        Route("/ui/upkeep/verify", upkeep.verify, methods=["POST"]),
        Route("/ui/upkeep/gc", upkeep.collect, methods=["POST"]),
        Route("/ui/patterns", PatternViews(context).show, methods=["GET"]),
        Route("/ui/models/{name:path}", views.model, methods=["GET"]),
    ]
