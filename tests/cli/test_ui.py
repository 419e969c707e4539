"""`zoo ui`: the page on a store that is not served, as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.runtime.server.page.looking import family, seen

#: What a process that only shows a store has no use for.
HEAVY = ("torch", "transformers", "peft", "runtime.engine", "openai")


@contextmanager
def opened(store: Path, options: Sequence[str] = ()) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `zoo ui` and give its address; when it ends it says what it has imported."""
    program = (
        "import json, sys, cli.app\n"
        f"try: cli.app.main(['ui', '--store', {str(store)!r}, '--port', '0', '--json', *{list(options)!r}])\n"
        f"finally: print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"], process
        finally:
            process.kill()


def test_a_store_is_shown_without_being_served(tmp_path: Path) -> None:
    with family(tmp_path / "store"), opened(tmp_path / "store") as (address, process):
        with httpx.Client(base_url=address, trust_env=False, timeout=30) as http:
            assert "org/fine" in seen(http, "/").one("table", class_="models").text
            assert seen(http, "/ui/lineage").all("svg", class_="tree")
            assert seen(http, "/ui/models/org/fine").all("svg", class_="strip")
            assert http.get("/v1/models").json()["error"]["code"] == "not_found"
            port = address.rpartition(":")[2]
            for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
                assert http.get("/", headers={"Host": host}).status_code == 200
            # A name of another site may be made to lead here; its pages would read this one.
            for host in ("elsewhere.example", f"elsewhere.example:{port}", "127.0.0.1.elsewhere.example", "", "[::1"):
                assert http.get("/", headers={"Host": host}).status_code == 421
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and json.loads(process.stdout.read()) == []
        assert process.wait(30) == 0


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with (
        family(tmp_path / "store"),
        opened(tmp_path / "store", ["--api-key", "k"]) as (address, _),
        httpx.Client(base_url=address, trust_env=False, timeout=30, headers={"Host": "zoo.example"}) as http,
    ):
        assert http.get("/").headers["location"] == "/ui/login?next=%2F"
        assert http.get("/", headers={"Authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 202), ("0.0.0.0", 403)])  # noqa: S104
def test_the_store_is_kept_from_this_machine_only(tmp_path: Path, host: str, status: int) -> None:
    with (
        family(tmp_path / "store"),
        opened(tmp_path / "store", ["--host", host]) as (address, _),
        httpx.Client(base_url=address.replace(host, "127.0.0.1"), trust_env=False, timeout=30) as http,
    ):
        assert http.post("/ui/upkeep/verify").status_code == 403
        assert http.post("/ui/upkeep/verify", headers={"X-Zoo-Page": "1"}).status_code == status
        assert bool(seen(http, "/ui/upkeep").all("button")) is (status == 202)


def test_there_must_be_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import cli.app

    with pytest.raises(SystemExit) as ended:
        cli.app.main(["ui", "--store", str(tmp_path / "none"), "--port", "0"])
    assert ended.value.code == 2 and "there is no store" in capsys.readouterr().err
