"""Forecasts of lengths made inside steps (TI-10) are the probes' own on transformers' hidden states, wherever chains
are cut, and change no token.

Each model has a probe of its own but `bare`, an adapter on a base with one: its rows run in the same batches.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from runtime.config import AgentConfig, ClusterConfig, EngineConfig
from runtime.decode_config import DecodeConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import SamplingParams, SequenceRequest
from surgery.models.load import load_model
from surrogates.lengths.probe import LengthProbe, probed_component
from surrogates.lengths.probe_storing import put_probe, stored_probe
from tests.chains import manifest_of
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

MODELS = ["llama", "neox", "lora", "bare"]
#: Layers before the probe of each model that has one.
BEHIND = {"llama": 1, "neox": 4, "lora": 2}
#: Those whose probe has a map for the answer's own tokens, too.
LATER = ("llama", "neox")
CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
SAMPLING = SamplingParams(8)
LENGTHS = (1, 3, 9, 17)
EDGES = (0, 2, 5, 9)


def put(bench: Bench, name: str, seed: int, fingerprint: str = "") -> None:  # noqa: F811
    """Store a probe of random weights."""
    target, draws = manifest_of(bench.store, name), torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(len(EDGES), 64, generator=draws), torch.randn(len(EDGES), generator=draws)
    later = LengthProbe(EDGES, 0, torch.randn(len(EDGES), 64, generator=draws), bias) if name in LATER else None
    probe = LengthProbe(EDGES, probed_component(target, BEHIND[name]), weight, bias, later)
    put_probe(bench.store, target, probe, {"fingerprint": fingerprint or target.fingerprint}, replace=True)


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    bench.family("gpt_neox", "neox", num_hidden_layers=6, seed=4)
    bench.lora("llama", "lora", seed=6)
    bench.lora("llama", "bare", seed=7)
    for seed, name in enumerate(BEHIND):
        put(bench, name, seed)
    return bench


@pytest.fixture(scope="module")
def known(family: Bench) -> dict[str, list[float]]:
    """What each probe forecasts from the hidden states of transformers, by sequence."""
    found: dict[str, list[float]] = {}
    for name, behind in BEHIND.items():
        model, probe = load_model(family.store, manifest_of(family.store, name)), stored_probe(family.store, name)
        assert probe is not None
        for number, prompt in enumerate(prompts(len(name), LENGTHS)):
            with torch.inference_mode():
                states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
            found[f"{name}-{number}"] = probe.masses(states[behind][:, -1])[0].tolist()
    return found


def cluster_of(
    bench: Bench,  # noqa: F811
    devices: int,
    probes: bool = True,
    engines: EngineConfig = CONFIG,
    **changes,
) -> VirtualCluster:
    half = half_page(bench.store, CONFIG, MODELS)
    described = [describe_chain(bench.store, name, CONFIG, half, 1) for name in MODELS]
    engine = replace(engines, kv_cache_memory_bytes=8000 * half, length_probes=probes)
    fields = (
        dict(
            config=ClusterConfig(devices=devices, placement="partition", prefill_chunk=8),
            agent_config=AgentConfig(recompute_chunk=4, fetch_window=1, length_probes=probes),
        )
        | changes
    )
    return VirtualCluster(
        chains=[each.chain for each in described],
        blocks=[block for each in described for block in each.blocks],
        devices=devices,
        make_engine=lambda name: StagedEngine(bench.store, engine, half, name),
        **fields,
    )


def ask(cluster: VirtualCluster, sampling: SamplingParams = SAMPLING) -> VirtualCluster:
    draws = random.Random(5)
    for model in MODELS:
        for number, prompt in enumerate(prompts(len(model), LENGTHS)):
            seq = f"{model}-{number}"
            cluster.ask(SequenceRequest(seq, f"r-{seq}", model, prompt, sampling), at=draws.randrange(4 * MS))
    cluster.run()
    cluster.expect_empty()
    return cluster


def forecasts(cluster: VirtualCluster) -> dict[str, list[float]]:
    """Return the mass of each sequence's forecast from its prompt, after asserting that each has at most one."""
    told = [each for each in cluster.trace.named("length.predicted") if len(each.extra["edges"]) == len(EDGES)]
    assert all(each.extra["made"] == 0 for each in told)
    assert len({each.seq for each in told}) == len(told)
    assert all(each.extra["edges"] == EDGES for each in told)
    return {str(each.seq): list(each.extra["mass"]) for each in told}


@pytest.fixture(scope="module")
def answers(family: Bench) -> dict[str, list[int]]:
    cluster = ask(cluster_of(family, 1, probes=False))
    assert not cluster.trace.named("length.predicted")
    return {seq: each.tokens for seq, each in cluster.told.items()}


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_forecasts_are_those_of_transformers_states(
    family: Bench,
    known: dict[str, list[float]],
    answers: dict[str, list[int]],
    devices: int,
) -> None:
    cluster = ask(cluster_of(family, devices))
    found = forecasts(cluster)
    assert found.keys() == known.keys(), "those of models with a probe, and no other ones"
    for seq, mass in found.items():
        assert mass == pytest.approx(known[seq], abs=2e-5), seq
    assert {seq: each.tokens for seq, each in cluster.told.items()} == answers
    assert cluster.scheduler.state().counters.predicted == len(known)


def test_prompts_of_one_token_are_forecast_where_decode_steps_are_recorded(
    family: Bench,
    known: dict[str, list[float]],
) -> None:
    """Such a row looks like one that decodes; a recording has no place for a probe."""
    engines = replace(CONFIG, graphs="on", kernels="stock")
    found = forecasts(ask(cluster_of(family, 2, engines=engines)))
    assert found.keys() == known.keys()
    for seq, mass in found.items():
        assert mass == pytest.approx(known[seq], abs=2e-5), seq


def test_given_lengths_are_not_forecast(family: Bench) -> None:
    assert not forecasts(ask(cluster_of(family, 2), SamplingParams(8, ignore_eos=True)))
    assert forecasts(ask(cluster_of(family, 2), SamplingParams(8, ignore_eos=True, stop_token_ids=(1,))))


def test_a_forecast_is_there_when_a_sequence_is_handed_off(family: Bench, known: dict[str, list[float]]) -> None:
    """TI-14: the decode path is chosen with it, and it stays with the sequence under its new epoch."""
    roles = (("d0", "prefill"), ("d1", "decode"), ("d2", "decode"))
    config = ClusterConfig(devices=3, roles=roles, prefill_chunk=8, decode=DecodeConfig(admission="peak", choice="po2"))
    cluster = ask(cluster_of(family, 3, config=config))
    assert forecasts(cluster).keys() == known.keys()
    events = list(enumerate(cluster.trace.events))
    chosen = {each.extra["seq"]: at for at, each in events if each.ev == "dispatch.candidates"}
    assert chosen.keys() >= {seq for seq in known if len(cluster.told[seq].tokens) > 1}
    assert all(at < chosen.get(each.seq, len(events)) for at, each in events if each.ev == "length.predicted")


def test_a_probe_of_other_content_is_left_out(family: Bench, known: dict[str, list[float]], caplog) -> None:
    put(family, "llama", 0, fingerprint="0" * 64)
    try:
        found = forecasts(ask(cluster_of(family, 2)))
    finally:
        put(family, "llama", 0)
    assert found.keys() == {seq for seq in known if not seq.startswith("llama")}
    assert "lengths of llama's answers are not forecast: llama@probe predicts another llama" in caplog.text


def test_hidden_states_that_are_no_numbers_give_no_forecast(
    family: Bench,
    known: dict[str, list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = LengthProbe.masses
    monkeypatch.setattr(LengthProbe, "masses", lambda probe, states: own(probe, states * float("nan")))
    assert not forecasts(ask(cluster_of(family, 2)))


# -- while answers are decoded -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known_later(family: Bench, answers: dict[str, list[int]]) -> dict[str, list[list[float]]]:
    """What the second maps forecast from transformers' states of each token of an answer, by sequence."""
    found: dict[str, list[list[float]]] = {}
    for name in LATER:
        model, probe = load_model(family.store, manifest_of(family.store, name)), stored_probe(family.store, name)
        assert probe is not None and probe.later is not None
        for number, prompt in enumerate(prompts(len(name), LENGTHS)):
            ids = torch.tensor([[*prompt, *answers[f"{name}-{number}"]]])
            with torch.inference_mode():
                states = model(ids, output_hidden_states=True).hidden_states[BEHIND[name]][0, len(prompt) :]
            found[f"{name}-{number}"] = probe.later.masses(states).tolist()
    return found


def again(
    bench: Bench,  # noqa: F811
    devices: int,
    steps: int,
    engines: EngineConfig = CONFIG,
    **changes,
) -> VirtualCluster:
    agents = AgentConfig(recompute_chunk=4, fetch_window=1, length_probes=True, probe_steps=steps)
    return ask(cluster_of(bench, devices, engines=engines, agent_config=agents, **changes))


def expect_later(cluster: VirtualCluster, known: dict[str, list[list[float]]]) -> dict[str, list[int]]:
    """Assert that all later forecasts are those; return after how many tokens each sequence had one."""
    found: dict[str, list[int]] = {}
    for each in cluster.trace.named("length.predicted"):
        if made := each.extra["edges"][1] - 1 if len(each.extra["edges"]) > len(EDGES) else 0:
            assert each.extra["edges"] == (0, made + 1, made + 2, made + 5, made + 9)
            assert each.extra["mass"][0] == 0.0
            assert each.extra["mass"][1:] == pytest.approx(known[str(each.seq)][made - 1], abs=2e-5), (each.seq, made)
            found.setdefault(str(each.seq), []).append(made)
    return found


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_answers_are_forecast_again_from_their_own_tokens(
    family: Bench,
    known: dict[str, list[float]],
    known_later: dict[str, list[list[float]]],
    answers: dict[str, list[int]],
    devices: int,
    graphs: str,
) -> None:
    """At any of their tokens, with the same tokens; models whose probe has no such map keep their first forecast."""
    engines = replace(CONFIG, graphs=graphs, kernels="stock") if graphs == "on" else CONFIG
    cluster = again(family, devices, 3, engines)
    found = forecasts(cluster)
    assert found.keys() == known.keys()
    for seq, mass in found.items():
        assert mass == pytest.approx(known[seq], abs=2e-5), seq
    times = expect_later(cluster, known_later)
    assert {seq.split("-")[0] for seq in times} == set(LATER)
    assert all(made == sorted(set(made)) for made in times.values())
    assert sum(map(len, times.values())) >= len(known_later)
    assert {seq: each.tokens for seq, each in cluster.told.items()} == answers
    assert cluster.scheduler.state().counters.predicted == len(known)


def test_they_are_forecast_again_after_so_many_steps_and_not_at_all_with_none(
    family: Bench, known_later: dict[str, list[list[float]]]
) -> None:
    """One sequence alone on one device: each step is one of its tokens."""
    for steps, expected in ((0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [2, 5]), (64, [])):
        agents = AgentConfig(length_probes=True, probe_steps=steps)
        cluster = cluster_of(family, 1, agent_config=agents, config=ClusterConfig(devices=1))
        cluster.ask(SequenceRequest("llama-1", "r", "llama", prompts(len("llama"), LENGTHS)[1], SAMPLING))
        cluster.run()
        assert expect_later(cluster, known_later) == ({"llama-1": expected} if expected else {})


def test_they_are_forecast_again_where_they_were_handed_off(
    family: Bench, known_later: dict[str, list[list[float]]], answers: dict[str, list[int]]
) -> None:
    roles = (("d0", "prefill"), ("d1", "decode"), ("d2", "decode"))
    config = ClusterConfig(devices=3, roles=roles, prefill_chunk=8, decode=DecodeConfig(admission="peak", choice="po2"))
    cluster = again(family, 3, 2, config=config)
    assert {seq.split("-")[0] for seq in expect_later(cluster, known_later)} == set(LATER)
    assert {seq: each.tokens for seq, each in cluster.told.items()} == answers
