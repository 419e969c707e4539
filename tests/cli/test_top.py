"""`zoo top`: a server's state on one screen; an unreachable server is a one-line error."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from cli.app import main
from cli.shared.output import human_bytes, plain_console, print_table
from cli.top import look, picture
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.observe.snapshot import picture_of
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request
from zoo.errors import InputError


def text(state: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    out = io.StringIO()
    plain_console(out, 160).print(picture(state, before, 2.0))
    return out.getvalue()


def state(tokens: int, cluster: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a server's state document."""
    counters = {
        "generated_tokens": tokens,
        "preemptions": 3,
        "steps": 7,
        "failed_steps": 1,
        "speculations": 9,
        "speculation_hits": 5,
    }
    agent = {
        "device": "cpu",
        "pages": {"capacity": 10, "free": 4},
        "memory": {"weights": 2_000_000},
        "counters": counters,
    }
    models = [{"name": "m", "running": 2, "waiting": 1, "blocks": ["b"]}]
    more = {} if cluster is None else {"cluster": cluster}
    return {
        "agents": [agent],
        "counters": counters,
        "models": models,
        "running": 2,
        "waiting": 1,
        "draining": False,
        **more,
    }


def test_one_device() -> None:
    shown = text(state(300), state(100))
    assert "2 running, 1 waiting, 100 tokens/s, 300 tokens in all, 3 preempted; 9 hops predicted, 5 rightly" in shown
    assert "6 / 10" in shown and "2.0 MB" in shown


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["org/[red]x", "a[/b]", "c:smile:"]
    shown = text({**state(5), "models": [{"name": name, "running": 0, "waiting": 0, "blocks": []} for name in names]})
    print_table(("model", "count"), [(name, 1) for name in names])
    printed = capsys.readouterr().out
    assert all(name in shown and name in printed for name in names)


def test_a_cluster_with_a_sequence_on_its_way() -> None:
    model = counting_model("m", "1 2* 3 4* 5* 6", max_model_len=256)
    cluster = VirtualCluster(
        [model], [(1, 3, 4)], devices=3, config=ClusterConfig(placement="partition", devices=3), page_bytes_per_ms=10.0
    )
    cluster.ask(request("travels", range(1, 30), "m", max_tokens=200))
    cluster.at(8 * MS, lambda: cluster.migrate("travels", range(2, 3), "d0"))
    cluster.at(12 * MS, lambda: cluster.migrate("travels", range(2, 3), "d0"))
    cluster.run(until=14 * MS)
    shown = text(state(5, picture_of(cluster.scheduler).document()))
    assert "1 under way" in shown and "travels" in shown
    assert all(name in shown for name in ("d0", "d1", "d2"))
    assert "d0 > d1 > d2" in shown or "d0 > d1" in shown


def test_loads_on_demand_and_estimates_are_shown() -> None:
    models = [counting_model(name, f"{at}1 {at}2*", max_model_len=64) for at, name in enumerate("abc", 1)]
    nbytes = sum(block.nbytes for block in models[0].blocks())
    config = ClusterConfig(devices=1, residency="swap")
    cluster = VirtualCluster(models, devices=1, config=config, limits=(nbytes,))
    for number, name in enumerate("abc"):
        cluster.ask(request(name, (1, 2), name), at=number * 100 * MS)
    cluster.run()
    document = state(5, picture_of(cluster.scheduler).document())
    assert " loads of " not in text(document)
    document["counters"] |= {"stage_loads": 3, "stage_unloads": 2, "loaded_bytes": 4_000_000}
    shown = text(document)
    assert "3 loads of 4.0 MB, 2 unloads" in shown
    assert "estimates beside what was measured" in shown and "1.00 ms" in shown
    assert f" / {human_bytes(nbytes)}" in shown


def test_links_between_devices_are_shown_and_those_that_failed_first() -> None:
    model = counting_model("m", "1 2* 3", max_model_len=256)
    cluster = VirtualCluster([model], [(1,)], devices=2, config=ClusterConfig(placement="partition", devices=2))
    cluster.run(until=1 * MS)
    document = picture_of(cluster.scheduler).document()
    assert "device to device" not in text(state(5, document))
    document["devices"][0]["links"] = {"d1": "direct"}
    document["devices"][1]["links"] = {"d0": "the other end: RuntimeError: Connection closed"}
    shown = text(state(5, document))
    assert shown.index("Connection closed") < shown.index("direct")


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(InputError, match="cannot be asked"):
        look("http://127.0.0.1:9", None)


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """Run a server that answers every GET with this body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "body",
    [
        b"[1, 2]",
        b"null",
        b"5",
        b"{}",
        b'{"agents": [], "models": [], "running": 0, "waiting": 0}',
        b'{"agents": 5}',
        b"<html>",
    ],
)
def test_a_server_that_is_no_zoo_is_an_error_of_one_line(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(body) as url, pytest.raises(SystemExit) as ended:
        main(["top", url, "--once"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("zoo: http://127.0.0.1") and said.count("\n") == 1
