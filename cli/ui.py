"""`zoo ui`: open the zoo's page on a store that is not served."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, StoreOption, say


def ui(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = 8001,
    api_key: Annotated[
        str | None, typer.Option(envvar="ZOO_API_KEY", help="Key that the page asks for.", show_default=False)
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one JSON document once ready.")] = False,
) -> None:
    """Show a store in a browser: models and what they share, lineage, chains. Loads no model; `zoo serve` has the same
    page at `/`.
    """
    from runtime.config import ServerConfig
    from runtime.server.run_server import address_of, bind, is_local, serve
    from zoo.api import Zoo

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with Zoo(store, database, create=False) as zoo, bind(host, port) as bound:
        from runtime.server.page.app import build_page_app

        alone = is_local(bound)
        if api_key is None and not alone:
            say("warning: no API key is set, and the page can be reached from other machines")
        app = build_page_app(zoo.store, api_key, alone)
        address = address_of(bound)
        shown = json.dumps({"address": address}) if as_json else address
        serve(app, ServerConfig(host, port, api_key, drain_seconds=1), bound, lambda: print(shown, flush=True))
