"""`zoo lengths --kind probe` trains a probe on a model's answers, and `zoo serve --lengths probe` forecasts with it.

Whatever runs the agents, forecasts are the stored probe's on the hidden states of transformers (TI-10).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cli.app
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import gather
from runtime.cluster.driver.log_file import LogFile
from runtime.messages import LengthsProbed
from runtime.scheduler.observe.replay_log import replay
from runtime.types import SamplingParams, SequenceRequest
from surgery.ingest.ingest import ingest
from surgery.models.load import load_model
from surgery.sources import open_source
from surrogates.lengths.probe_storing import PROBE_ENDING, stored_probe
from surrogates.lengths.storing import ENDING
from tests.checkpoints import make, make_lora
from tests.runtime.virtual import ListTrace
from zoo.api import Zoo
from zoo.errors import InputError

MODELS = ["org/m", "org/lora"]
SAMPLING = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with two models and their trained probes, the second one's behind another layer."""
    root = tmp_path_factory.mktemp("probes")
    with Zoo(root / "store") as zoo:
        zoo.ingest(make("llama", root / "m", num_hidden_layers=4), "org/m")
        ingest(zoo.store, open_source(str(make_lora(root / "m", root / "lora"))), name="org/lora", base="org/m")
    lines = root / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"tell me {at} things"}) + "\n" for at in range(120)))
    for name, layer in zip(MODELS, ("2", "3"), strict=True):
        quick = ("--prompts", str(lines), "--max-tokens", "24", "--temperature", "1", "--kind", "probe", "--again")
        with pytest.raises(SystemExit) as ended:
            cli.app.main(["lengths", name, *quick, "--layer", layer, "--store", str(root / "store")])
        assert not ended.value.code
    return root / "store"


def requests() -> list[SequenceRequest]:
    found = []
    for model in MODELS:
        for at, prompt in enumerate([(7,), (5, 6, 7), tuple(range(3, 90))]):
            found.append(SequenceRequest(f"{model}-{at}", f"r{at}", model, prompt, SAMPLING))
    return found


def known(zoo: Zoo) -> dict[str, list[float]]:
    """Return what the stored probes forecast from the hidden states of transformers, by sequence."""
    found: dict[str, list[float]] = {}
    for model, layer in zip(MODELS, (2, 3), strict=True):
        stock, probe = load_model(zoo.store, zoo.model(model).manifest), stored_probe(zoo.store, model)
        assert probe is not None
        for each in requests():
            if each.model == model:
                with torch.inference_mode():
                    states = stock(torch.tensor([each.prompt]), output_hidden_states=True).hidden_states[layer]
                found[each.seq] = probe.masses(states[:, -1])[0].tolist()
    return found


@pytest.mark.parametrize(
    ("agents", "backend", "roles"),
    [
        (1, "inline", None),
        (2, "threads", None),
        (2, "processes", None),
        (3, "processes", "prefill,prefill,decode"),
    ],
)
def test_forecasts_are_the_stored_probes_own(
    store: Path, tmp_path: Path, agents: int, backend: str, roles: str | None
) -> None:
    placed = {"agents": agents, "placement": "partition"} if agents > 1 else {}
    options = gather(
        None,
        {
            "lengths": "probe", "decode_admission": "peak", "backend": backend, "kv_cache_memory_bytes": "2MiB",
            **placed, **({"roles": roles} if roles else {}),
        },
    )  # fmt: skip
    trace, log = ListTrace(), LogFile(tmp_path / "log")
    with Zoo(store) as zoo:
        chosen = choose(zoo, MODELS, None, options.executor, "cpu")
        with start_driver(zoo, options, chosen, trace=trace, log=log.write) as driver:
            events = list(driver.run(requests()))
        log.close()
        found = {each.seq: list(each.extra["mass"]) for each in trace.named("length.predicted")}
        expected = known(zoo)
    assert [each.error for each in events if each.error] == []
    assert found.keys() == expected.keys()
    for seq, mass in found.items():
        assert mass == pytest.approx(expected[seq], abs=2e-5), seq
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()[1:]]
    told = [event for _, kind, event, _ in lines if kind == LengthsProbed.__name__]
    assert sorted(seq for _, _, seqs, _ in told for seq in seqs) == sorted(expected)
    assert replay(tmp_path / "log") == len(lines)


@pytest.mark.parametrize(("agents", "backend"), [(1, "inline"), (2, "processes")])
def test_answers_are_forecast_again_while_they_are_decoded(
    store: Path, tmp_path: Path, agents: int, backend: str
) -> None:
    """From their own tokens, by the stored probes' second maps; the tokens are those without it."""
    placed = {"agents": agents, "placement": "partition"} if agents > 1 else {}
    told, answers = {}, {}
    for steps in (0, 2):
        settings = tmp_path / f"{steps}.toml"
        settings.write_text(f"[decode]\nprobe_steps = {steps}\n")
        options = gather(
            settings,
            {
                "lengths": "probe", "decode_admission": "peak", "backend": backend, "kv_cache_memory_bytes": "2MiB",
                **placed,
            },
        )  # fmt: skip
        trace, answers[steps] = ListTrace(), {each.seq: [] for each in requests()}
        with Zoo(store) as zoo:
            chosen = choose(zoo, MODELS, None, options.executor, "cpu")
            with start_driver(zoo, options, chosen, trace=trace) as driver:
                for event in driver.run(requests()):
                    answers[steps][event.seq].append(event.token)
        told[steps] = [each for each in trace.named("length.predicted") if each.extra["mass"][0] == 0.0]
    assert answers[0] == answers[2] and not told[0]
    assert {each.seq for each in told[2]} == set(answers[0]), "two steps apart, in answers of six tokens"
    with Zoo(store) as zoo:
        expected = known_later(zoo, answers[0])
    for each in told[2]:
        made = each.extra["edges"][1] - 1
        assert each.extra["mass"][1:] == pytest.approx(expected[str(each.seq), made], abs=2e-5), (each.seq, made)


def known_later(zoo: Zoo, answers: dict[str, list[int]]) -> dict[tuple[str, int], list[float]]:
    """Return what the stored probes forecast from transformers' states of answers, by sequence and tokens so far."""
    found = {}
    for model, layer in zip(MODELS, (2, 3), strict=True):
        stock, probe = load_model(zoo.store, zoo.model(model).manifest), stored_probe(zoo.store, model)
        assert probe is not None and probe.later is not None
        first = int(probe.edges[1] == 1)  # the bucket of nothing still to come is left out
        for each in requests():
            if each.model == model:
                ids = torch.tensor([[*each.prompt, *answers[each.seq]]])
                with torch.inference_mode():
                    states = stock(ids, output_hidden_states=True).hidden_states[layer][0, len(each.prompt) :]
                for at, mass in enumerate(probe.later.masses(states).tolist(), 1):
                    found[each.seq, at] = mass[first:]
    return found


def test_serving_without_a_probe_is_refused(store: Path, tmp_path: Path) -> None:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(make("llama", tmp_path / "m"), "org/m")
        options = gather(None, {"lengths": "probe", "decode_admission": "peak"})
        with pytest.raises(InputError, match="`zoo lengths org/m --kind probe` makes one"):
            start_driver(zoo, options, choose(zoo, ["org/m"], None, options.executor, "cpu"))
    with pytest.raises(InputError, match="--decode-admission or --decode-choice"):
        gather(None, {"lengths": "probe"})


def test_probes_are_no_models(store: Path) -> None:
    with Zoo(store) as zoo:
        assert set(choose(zoo, [], None, "auto", "cpu").names) == set(MODELS)
        with pytest.raises(InputError, match="serve its target"):
            choose(zoo, ["org/m" + PROBE_ENDING], None, "auto", "cpu")
        assert not any(entry.name.endswith(ENDING) for entry in zoo.entries())
