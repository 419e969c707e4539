"""Real models with K and V on several devices: what one device answers, log-probabilities included (IL-01, IL-27).

They are two families, an adapter and a stitched chain; prompts come in chunks of eight tokens, over lent pages, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.chains import Array
from runtime.config import ClusterConfig, Placement
from runtime.engine.attention.lent import LentPages
from runtime.engine.executors.stage import StagedEngine
from runtime.lending_config import LendingConfig
from runtime.loans import LoanQuery
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.real_models.test_chains import MODELS, cluster_of, family  # noqa: F401
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

LENGTHS = (3, 60, 40)
KINDS = {
    "greedy": SamplingParams(24, ignore_eos=True),
    "sampled": SamplingParams(24, ignore_eos=True, temperature=0.9, top_p=0.8, seed=5, logprobs=2),
}


def config_of(devices: int, mode: Any = "planned", placement: Placement = "replicate", **loans: Any) -> ClusterConfig:
    lending = LendingConfig(mode, **{"shape": "tokens", "cut_tokens": 1} | loans)
    return ClusterConfig(devices=devices, placement=placement, prefill_chunk=8, lending=lending, prefix_caching="off")


def ask(cluster: VirtualCluster, models: Sequence[str] = MODELS) -> VirtualCluster:
    number = 0
    for model in models:
        for at, prompt in enumerate(prompts(len(model), LENGTHS)):
            for kind, sampling in KINDS.items():
                seq, number = f"{model}-{at}-{kind}", number + 1
                cluster.ask(SequenceRequest(seq, f"r-{seq}", model, prompt, sampling), at=number * MS // 4)
    cluster.run()
    cluster.expect_empty()
    return cluster


def told(cluster: VirtualCluster) -> dict[str, list[tuple[Any, ...]]]:
    return {
        seq: [(e.token, None if e.logprob is None else round(e.logprob, 3), e.finish) for e in each.events]
        for seq, each in cluster.told.items()
    }


@pytest.fixture(scope="module")
def alone(family: Bench) -> dict[str, list[tuple[Any, ...]]]:  # noqa: F811
    return told(ask(cluster_of(family, 1, pages=4000, config=config_of(1, "off"))))


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize(("devices", "pages"), [(2, 80), (3, 60), (4, 50)])
def test_answers_over_lent_pages_are_those_of_one_device(
    family: Bench,  # noqa: F811
    alone: dict[str, list[tuple[Any, ...]]],
    devices: int,
    pages: int,
    shape: str,
) -> None:
    cluster = ask(cluster_of(family, devices, pages=pages, config=config_of(devices, shape=shape)))
    assert told(cluster) == alone
    counters = cluster.scheduler.state().counters
    assert counters.loans > 0 and counters.failed_steps == counters.loans_refused == 0
    lenders = {event.extra["seq"].split("-")[0] for event in cluster.trace.named("kv.lend")}
    assert len(lenders) > 1 and (devices != 3 or lenders == set(MODELS)), "loans of every kind of model"


@pytest.mark.parametrize("ship", ["pages", "cheapest"])
def test_answers_are_the_same_where_pages_travel(
    family: Bench,  # noqa: F811
    alone: dict[str, list[tuple[Any, ...]]],
    ship: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Instead of queries: to the last bit, as the same attention runs over the same pages (IL-28)."""
    pulled, attend = Counter[bool](), LentPages.attend

    def counted(lent: LentPages, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        pulled[query.pull] += 1
        return attend(lent, query, arrays, debtor)

    monkeypatch.setattr(LentPages, "attend", counted)
    exact = [
        {seq: [(e.token, e.logprob) for e in each.events] for seq, each in cluster.told.items()}
        for cluster in (ask(cluster_of(family, 3, pages=60, config=config_of(3, ship=how))) for how in ("query", ship))
    ]
    assert exact[0] == exact[1] and {seq: [token for token, _ in told] for seq, told in exact[1].items()} == {
        seq: [token for token, *_ in told] for seq, told in alone.items()
    }
    assert pulled[False] > 0 and (ship == "cheapest" or pulled[True] == pulled[False])


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize(("devices", "pages"), [(2, 80), (3, 60)])
def test_answers_over_pages_that_come_back_are_those_of_one_device(
    family: Bench,  # noqa: F811
    alone: dict[str, list[tuple[Any, ...]]],
    devices: int,
    pages: int,
    shape: str,
) -> None:
    config = config_of(devices, recall=0.0, circle_pages=2, shape=shape)
    cluster = cluster_of(family, devices, pages=pages, config=config)
    cluster.ticks(MS, 400 * MS)
    assert told(ask(cluster)) == alone
    counters = cluster.scheduler.state().counters
    assert counters.loan_recalls > 3 and counters.failed_steps == 0


def test_a_sequence_that_has_been_moved_lends_before_its_first_row(
    family: Bench,  # noqa: F811
    alone: dict[str, list[tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engine learns of its pages, and of those that are away, in one step."""
    early, send_away = Counter[bool](), SequencePageTables.send_away

    def counted(tables: SequencePageTables, key: str, *rest: Any) -> bool:
        new, done = key not in tables.told, send_away(tables, key, *rest)
        early[new and done] += 1
        return done

    monkeypatch.setattr(SequencePageTables, "send_away", counted)
    cluster, rng = cluster_of(family, 3, pages=60, config=config_of(3)), random.Random(2)
    for at in range(4, 800):
        cluster.at(at * MS // 8, lambda: cluster.migrate_some(rng) and None)
    assert told(ask(cluster)) == alone
    assert early[True] > 0 and cluster.scheduler.state().counters.failed_steps == 0, early


def test_without_kernels_answers_are_the_same(family: Bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Modules and attention of torch alone, over lent pages."""
    monkeypatch.setattr("runtime.engine.models.registry.kernels_for", lambda config: None)
    one = ask(cluster_of(family, 1, pages=4000, config=config_of(1, "off")), ["llama", "neox"])
    many = ask(cluster_of(family, 3, pages=60, config=config_of(3)), ["llama", "neox"])
    assert told(many) == told(one) and many.scheduler.state().counters.loans > 0


def test_a_changed_byte_of_a_lent_page_changes_answers(
    family: Bench,  # noqa: F811
    alone: dict[str, list[tuple[Any, ...]]],
) -> None:
    """Twenty times another byte, the high one of a number: nearly all answers that need the page change."""
    seq, changed = "llama-1-sampled", 0
    for at in range(20):
        cluster = cluster_of(family, 2, pages=15, config=config_of(2, placement="on-demand"))
        prompt = prompts(len("llama"), LENGTHS)[1]
        cluster.ask(SequenceRequest(seq, f"r-{seq}", "llama", prompt, KINDS["sampled"]))
        spoil(cluster, at)
        cluster.run()
        assert cluster.scheduler.state().counters.loans > 0
        changed += told(cluster)[seq] != alone[seq]
    assert changed >= 19


def spoil(cluster: VirtualCluster, number: int) -> None:
    """Change one byte of a page when it is first lent."""
    known = Counter[str]()

    def look() -> None:
        for node in cluster.living():
            engine = node.engine
            assert isinstance(engine, StagedEngine)
            if engine._lent._held and not known:
                known["found"] += 1
                pages = next(iter(engine._lent._held.values())).pages
                page = [int(pages[number % pages.shape[0], 0])]
                data = bytearray(engine.read_pages(page).data)
                data[4 * (7 * number % 32) + 3] ^= 0x41
                engine.write_pages(page, Array("uint8", (1, len(data)), bytes(data)))

    for at in range(400):
        cluster.at(at * MS // 4, look)


def test_windowed_models_are_not_lent(family: Bench) -> None:  # noqa: F811
    cluster = cluster_of(family, 2, pages=15, config=config_of(2, placement="on-demand"))
    chain = cluster.scheduler._state.chains["llama"]
    cluster.scheduler._state.chains["llama"] = replace(chain, spec=replace(chain.spec, windowed=True))
    cluster.ask(SequenceRequest("a", "r", "llama", prompts(1, (60,))[0], KINDS["greedy"]))
    cluster.run()
    assert "which has" in (cluster.told["a"].last.error or "") and not cluster.scheduler.state().counters.loans
