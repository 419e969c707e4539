"""The guide's rules and dashboard, read by Prometheus itself: alerts fire on what they are for, queries find data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer, adapt
from runtime.server.run_server import bind
from tests.docs.guiding import GUIDES
from tests.runtime.frontend.samples import byte_level
from tests.runtime.server.aliases.looking import stored
from tests.runtime.server.harness import Running, eventually, running
from zoo.aliases import set_alias
from zoo.keys import make_key

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="ALERTS AND DASHBOARD ARE NOT CHECKED BY PROMETHEUS: promtool is not installed"
)
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="ALERTS AND DASHBOARD ARE NOT RUN BY PROMETHEUS: prometheus is not installed"
)
ALERTS = GUIDES / "operating" / "alerts.yml"
KEY = "the-servers-own"

#: By alert: series that let it fire after an hour, and the same ones as they are while all is well.
#: `a+bxn`: n more values, each greater by b.
FIRES: dict[str, list[tuple[str, str, str]]] = {
    "BlockZooDown": [('up{job="blockzoo", instance="a"}', "0x90", "1x90")],
    "BlockZooDeviceDown": [('blockzoo:agent_up{device="cpu"}', "0x90", "1x90")],
    "BlockZooDeviceDies": [('blockzoo:agent_deaths_total{device="cpu"}', "0x50 1x3 2x3 3x30", "0x50 1x40")],
    "BlockZooStepsFail": [('blockzoo:failed_steps_total{instance="a"}', "0x55 1x40", "3x90")],
    "BlockZooQueueGrows": [('vllm:num_requests_waiting{instance="a", model_name="m"}', "101x90", "100x90")],
    "BlockZooSlowFirstToken": [
        ('vllm:time_to_first_token_seconds_bucket{le="5.0", model_name="m"}', "0+90x90", "0+99x90"),
        ('vllm:time_to_first_token_seconds_bucket{le="10.0", model_name="m"}', "0+100x90", "0+100x90"),
        ('vllm:time_to_first_token_seconds_bucket{le="+Inf", model_name="m"}', "0+100x90", "0+100x90"),
    ],
    "BlockZooLate": [
        ('blockzoo:slo_met_total{instance="a"}', "0+8x90", "0+10x90"),
        ('blockzoo:slo_missed_total{instance="a"}', "0+1x90", "0+1x90"),
    ],
    "BlockZooJournalFails": [('blockzoo:queue_failures_total{instance="a"}', "0x58 1x40", "2x90")],
    "BlockZooRequestGivenUp": [('blockzoo:queue_requests{state="dead"}', "1x20 2x70", "1x90")],
}


def rules() -> list[dict[str, Any]]:
    return list(yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"])


def queries() -> list[str]:
    """Return what the dashboard asks Prometheus."""
    panels = json.loads((GUIDES / "operating" / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def settings() -> str:
    """Return the guide's settings of Prometheus, with the server's key in the same folder."""
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", (GUIDES / "operating.md").read_text(), re.MULTILINE | re.DOTALL)
    return str(shown).replace("/etc/prometheus/blockzoo.key", "key")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_and_queries_are_what_prometheus_reads(tmp_path: Path) -> None:
    promtool("check", "rules", ALERTS)
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", tmp_path / "queries.yml")
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "prometheus.yml").write_text(settings().replace("127.0.0.1:8000", "127.0.0.1:1"))
    promtool("check", "config", tmp_path / "prometheus.yml")


@needs_promtool
@pytest.mark.parametrize("ill", [True, False], ids=["fires", "keeps quiet"])
@pytest.mark.parametrize("name", FIRES)
def test_an_alert_fires_on_what_it_is_for_only(tmp_path: Path, name: str, ill: bool) -> None:
    (rule,) = [each for each in rules() if each["alert"] == name]
    series = [{"series": which, "values": bad if ill else good} for which, bad, good in FIRES[name]]
    asked: dict[str, Any] = {"eval_time": "1h", "alertname": name, "exp_alerts": []}
    if ill:
        labels = labels_of(name)
        summary = rule["annotations"]["summary"]
        for label, value in labels.items():
            summary = summary.replace("{{ $labels." + label + " }}", value)
        asked["exp_alerts"] = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": [asked]}]
    written = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(written))
    promtool("test", "rules", tmp_path / "test.yml")


def labels_of(name: str) -> dict[str, str]:
    """Return the labels of an alert's series that the alert keeps."""
    kept = {"BlockZooSlowFirstToken": {"model_name": "m"}, "BlockZooQueueGrows": {"instance": "a"}}
    inner = FIRES[name][0][0].partition("{")[2].rstrip("}")
    return kept.get(name) or {key: json.loads(value) for key, value in (each.split("=") for each in inner.split(", "))}


def test_each_alert_is_tried() -> None:
    assert [rule["alert"] for rule in rules()] == list(FIRES)


@contextmanager
def scraped(server: Running, folder: Path) -> Iterator[httpx.Client]:
    """Run Prometheus as the guide sets it up, but for a second between two scrapes; give a client of its API."""
    target = server.address.removeprefix("http://")
    given = settings().replace("127.0.0.1:8000", target)
    (folder / "prometheus.yml").write_text("global: {scrape_interval: 1s, evaluation_interval: 1s}\n" + given)
    (folder / "alerts.yml").write_text(ALERTS.read_text())
    (folder / "key").write_text(KEY)
    with bind("127.0.0.1", 0) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    with (folder / "log").open("w") as log, httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
        process = subprocess.Popen([str(PROMETHEUS), *options], cwd=folder, stdout=log, stderr=log)
        try:
            yield client
        finally:
            process.kill()
            process.wait()


@contextmanager
def asked_all_the_time(server: Running, secret: str) -> Iterator[None]:
    """Let a client ask without a pause: by an alias, with deadlines that can and cannot be met, durably."""
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.address, headers={"x-api-key": secret}, trust_env=False) as client:
            number = 0
            while not over.is_set():
                number += 1
                body = {
                    "model": "prod",
                    "prompt": list(range(5, 40)),
                    "max_tokens": 4,
                    "slo_ms": 1 + number % 2 * 60_000,
                }
                keys = {"Idempotency-Key": str(number)} if number % 5 == 0 else {}
                client.post("/v1/completions", json=body, headers=keys)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


@needs_prometheus
def test_each_query_and_alert_finds_data_in_a_server_that_prometheus_scrapes(tmp_path: Path) -> None:
    tokenizer: Tokenizer = adapt(byte_level(tmp_path / "tokenizer"))
    config = replace(ServerConfig(api_key=KEY), client_keys=True)
    sides = [rule["expr"].rsplit(sign, 1)[0] for rule in rules() for sign in (" == ", " > ") if sign in rule["expr"]]
    with stored(tmp_path / "store") as store:
        set_alias(store, "prod", "org/base")
        secret = make_key(store, "team")
        with (
            running(tokenizer, store=store, config=config, queue=str(tmp_path / "queue"), sharing="cached") as server,
            asked_all_the_time(server, secret),
            scraped(server, tmp_path) as prometheus,
        ):
            missing = {*queries(), *sides}

            def found_all() -> bool:
                for query in sorted(missing):
                    if values_of(prometheus, query):
                        missing.discard(query)
                return not missing

            eventually(found_all, 30)
            assert not missing
            loaded = prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
            assert [rule["health"] for rule in loaded] == ["ok"] * len(FIRES)


def values_of(prometheus: httpx.Client, query: str) -> list[float]:
    """Return the numbers that a query finds now."""
    try:
        answer = prometheus.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:  # it starts
        return []
    if answer.status_code == 503:
        return []
    found = answer.raise_for_status().json()["data"]["result"]
    return [value for value in (float(each["value"][1]) for each in found) if value == value]
