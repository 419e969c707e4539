"""Sequences of which a creditor has died: only what it held is computed again (IL-18).

Every token depends on every page, so a page that was computed from wrong ones changes the answer.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from runtime.chains import Array, StageResult
from runtime.config import ClusterConfig
from runtime.control.agent_io import Send
from runtime.control.scheduler_io import AgentDown
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.lending_config import LendingConfig, LoanShape
from runtime.messages import LostLayers, MendPages, MigrationFailed, RowsLost
from runtime.types import StepPlan
from tests.runtime.scheduler.anything import Anything
from tests.runtime.scheduler.lending.test_lending import M, cluster, prompt
from tests.runtime.scheduler.lending.test_recalls import two_that_share_a_device
from tests.runtime.scheduler.lending.test_shapes import of_six_layers
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.scheduler.virtual_pool import Pooled
from tests.runtime.virtual import request

CHUNK = 8


def lost_tokens(one: VirtualCluster) -> int:
    """Return the tokens of which dead creditors held K and V, in some layers or in all of them."""
    lost = defaultdict[tuple[int, str], set[int]](set)
    for event in one.trace.named("kv.lost"):
        lost[event.t, event.dev] |= set(range(*event.extra["groups"]))
    return sum(map(len, lost.values())) * M.spec.page_tokens


def long_one(devices: int = 4, pages: int = 60, **changes: Any) -> VirtualCluster:
    one = cluster(devices, pages, recall=1.0, **{"mend": True} | changes)
    one.ticks(MS, 300 * MS)
    one.ask(request("a", prompt(150), "m", max_tokens=40, ignore_eos=True))
    return one


def expect_one_mend(one: VirtualCluster) -> int:
    """Run to the end; return the tokens mended: what was lost and a chunk at most, at once, if anything was lost."""
    one.run()
    one.expect()
    counters = one.scheduler.state().counters
    assert counters.mended_tokens <= lost_tokens(one) + CHUNK
    assert counters.preemptions == counters.loss_restarts == 0
    assert counters.mends == (lost_tokens(one) > 0) == counters.recoveries
    return counters.mended_tokens


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize("victim", ["d1", "d2", "d3"])
def test_only_what_a_dead_creditor_held_is_computed_again(victim: str, shape: LoanShape) -> None:
    mended = 0
    for at in range(20, 200, 9):
        one = long_one(shape=shape)
        one.at(at * MS, lambda one=one: one.kill(victim))
        mended += expect_one_mend(one)
    assert mended > 0


@pytest.mark.parametrize(("layers", "first", "why"), [((0, 99), 8, "layer 98"), ((0, 1), 4000, "tokens before")])
def test_an_agent_refuses_to_mend_what_it_does_not_have(layers: tuple[int, int], first: int, why: str) -> None:
    """And goes on as before: what other agents send is not believed."""
    one, heard = long_one(), list[MigrationFailed]()

    def ask() -> None:
        agent = one.nodes["d0"].agent
        epoch = one.scheduler.sequences["a"].epoch
        order = MendPages(999, "a", epoch, (("d0", 0),), (LostLayers(0, layers),), first, (1, 2, 3, 4))
        heard.extend(each.message for each in agent.handle(order, (), one.now) if isinstance(each, Send))

    one.at(60 * MS, ask)
    one.run()
    one.expect()
    assert [each.move for each in heard] == [999] and why in heard[0].reason


@pytest.mark.parametrize(("victim", "times"), [("d1", range(24, 40)), ("d2", range(52, 68))])
def test_a_creditor_that_dies_before_its_loan_stands_has_nothing_to_mend(victim: str, times: range) -> None:
    """Regression: a recovery was counted where nothing was lost. `times`: in half milliseconds, around that loan."""
    nothing = 0
    for at in times:
        one = long_one()
        one.at(at * MS // 2, lambda one=one: one.kill(victim))
        nothing += expect_one_mend(one) == 0
    assert nothing


@pytest.mark.parametrize(("victim", "layers"), [("d1", (0, 1)), ("d2", (1, 2))])
def test_only_lost_layers_are_put_back(victim: str, layers: tuple[int, int]) -> None:
    """Those of other layers stay, here and on a living device; on the way they are computed in pages of their own."""
    found = set[tuple[int, int]]()
    for at in range(30, 70, 5):
        one = of_six_layers("layers", 8, 120, cap=0.3)
        one.ask(request("a", prompt(180), "m", max_tokens=40, ignore_eos=True))
        one.at(at * MS, lambda one=one: one.kill(victim))
        one.run()
        one.expect()
        mends = [each for _, _, _, each in one.sent if isinstance(each, MendPages)]
        found |= {lost.layers for each in mends for lost in each.lost}
        counters = one.scheduler.state().counters
        assert counters.mended_tokens <= lost_tokens(one) + CHUNK and counters.loss_restarts == 0
    assert found == {layers}


def test_layers_of_different_devices_are_lost_at_once() -> None:
    """What is lost in several layers is computed once."""
    both = 0
    for at in range(30, 70, 5):
        one = of_six_layers("layers", 8, 120, cap=0.3)
        one.ask(request("a", prompt(180), "m", max_tokens=40, ignore_eos=True))
        one.at(at * MS, lambda one=one: (one.kill("d1"), one.kill("d2")))
        one.run()
        one.expect()
        both += sum(len(each.lost) > 1 for _, _, _, each in one.sent if isinstance(each, MendPages))
        assert one.scheduler.state().counters.mended_tokens <= lost_tokens(one) + CHUNK
    assert both > 4


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize("victim", ["d1", "d3"])
def test_negotiated_loans_are_mended_too(victim: str, shape: LoanShape) -> None:
    """The devices that take pages in place of the dead one are found by the managers of the pool."""
    mended = 0
    for at in range(20, 150, 9):
        lending = LendingConfig("negotiated", recall=1.0, mend=True, beat_ms=20, shape=shape, cut_tokens=1)
        config = ClusterConfig(devices=4, placement="replicate", prefill_chunk=CHUNK, lending=lending)
        one = Pooled([M], [()], devices=4, pages=60, config=config, beat=20 * MS)
        one.ask(request("a", prompt(150), "m", max_tokens=120, ignore_eos=True))
        one.at(at * MS, lambda one=one: one.kill(victim))
        one.run()
        one.expect()
        counters = one.scheduler.state().counters
        assert counters.mended_tokens <= lost_tokens(one) + CHUNK
        assert counters.loss_restarts == 0 and counters.mends == (lost_tokens(one) > 0)
        mended += counters.mends
    assert mended > 1


@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_two_creditors_die_one_after_the_other(shape: LoanShape) -> None:
    mended = 0
    for seed in range(12):
        rng = random.Random(seed)
        one = long_one(rng.choice((3, 4, 5)), shape=shape)
        first = rng.randrange(30, 180) * MS
        for number, name in enumerate(rng.sample([f"d{at}" for at in range(1, one.devices)], 2)):
            one.at(first + number * rng.randrange(12 * MS), lambda one=one, name=name: one.kill(name))
        one.run()
        one.expect()
        counters = one.scheduler.state().counters
        if not counters.loss_restarts:
            assert counters.mended_tokens <= lost_tokens(one) + 2 * CHUNK
        mended += counters.mends
    assert mended > 3


@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_a_second_creditor_dies_while_it_is_mended(shape: LoanShape) -> None:
    plain = long_one(shape=shape)
    plain.at(60 * MS, lambda: plain.kill("d1"))
    plain.run()
    begun = [event.t for event in plain.trace.named("kv.mend.start")]
    inside = 0
    for at in sorted({time + shift * MS // 2 for time in begun[::3] for shift in range(3)}):
        one = long_one(shape=shape)
        one.at(60 * MS, lambda one=one: one.kill("d1"))
        one.at(at, lambda one=one: one.kill("d2"))
        one.run()
        one.expect()
        counters, names = one.scheduler.state().counters, [event.ev for event in one.trace.events]
        assert counters.mended_tokens <= lost_tokens(one) + 2 * CHUNK and counters.mends > 0
        assert counters.preemptions == counters.loss_restarts == 0
        first, last = names.index("kv.mend.start"), len(names) - names[::-1].index("kv.mend")
        inside += "kv.lost" in names[first:last]
    assert inside > 4


@dataclass
class Unaware(VirtualCluster):
    """A virtual cluster in which a death is known to the scheduler only after `unaware` ns."""

    unaware: int = 30 * MS

    def kill(self, name: str) -> None:
        self.nodes[name].alive = False
        self.at(self.now + self.unaware, lambda: self.tell(AgentDown(name, "killed")))


@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_a_step_that_failed_before_the_death_is_known_goes_on_as_soon_as_it_is(shape: LoanShape) -> None:
    """Without news of a creditor it would wait for a second."""
    mended = 0
    for at in range(40, 160, 8):
        one = long_one(4, made=Unaware, shape=shape)
        one.at(at * MS, lambda one=one: one.kill("d1"))
        one.run()
        one.expect()
        begun = [event.t for event in one.trace.named("kv.mend.start")]
        known = [event.t for event in one.trace.named("kv.lost")]
        if known:
            assert begun and begun[0] - known[0] < 20 * MS, (at, known, begun)
            mended += 1
    assert mended > 2


def test_without_the_switch_all_of_it_runs_again() -> None:
    one = long_one(mend=False)
    one.at(60 * MS, lambda: one.kill("d1"))
    one.run()
    one.expect()
    counters = one.scheduler.state().counters
    assert counters.mended_tokens == counters.mends == 0 < counters.loss_restarts == counters.recoveries
    assert counters.restarted_tokens > lost_tokens(one)


def test_a_creditor_dies_while_its_pages_come_back() -> None:
    plain = two_that_share_a_device()
    plain.run()
    begun = [event.t for event in plain.trace.named("kv.recall.start")]
    mended = 0
    for at in sorted({time + shift * MS // 10 for time in begun for shift in (0, 1, 3, 5, 10)}):
        one = two_that_share_a_device(mend=True)
        one.at(at, lambda one=one: one.kill("d1"))
        one.run()
        one.expect()
        mended += one.scheduler.state().counters.mends
    assert mended > 0


@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_an_abort_while_it_is_mended_frees_everything(shape: LoanShape) -> None:
    plain = long_one(shape=shape)
    plain.at(60 * MS, lambda: plain.kill("d1"))
    plain.run()
    begun = [event.t for event in plain.trace.named("kv.mend.start")]
    assert begun
    for at in sorted({time + shift * MS // 2 for time in begun[:4] for shift in range(4)}):
        one = long_one(shape=shape)
        one.at(60 * MS, lambda one=one: one.kill("d1"))
        one.abort("a", at)
        one.run()
        one.expect_empty()


def test_with_a_decode_credit_under_way_all_of_it_runs_again() -> None:
    whys = set[str]()
    for at in range(60, 130, 4):
        one = long_one(settings={"stride": 4})
        one.at(at * MS, lambda one=one: one.kill("d1"))
        one.run()
        one.expect()
        whys |= {event.extra["why"] for event in one.trace.named("kv.mend.none")}
    assert whys == {"it decodes on credit"}


def test_schedules_with_loans_mend() -> None:
    mended = 0
    for seed in (3, 20, 22):
        one = Anything(seed=seed, lends=True)
        one.run()
        one.expect_end()
        mended += one.scheduler.state().counters.mends
    assert mended > 1


@pytest.mark.parametrize(("shape", "layers"), [("layers", {1}), ("tokens", {6})])
def test_rows_of_a_mend_pass_no_layer_behind_the_last_lost_one(
    shape: LoanShape, layers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, run = set[int](), IntegerEngine.run

    def recorded(self: IntegerEngine, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        passed.update(row.layers for row in plan.rows if "!" in row.seq)
        return run(self, plan, inputs)

    monkeypatch.setattr(IntegerEngine, "run", recorded)
    for at in range(30, 70, 10):
        one = of_six_layers(shape, 8, 120, cap=0.3)
        one.ask(request("a", prompt(180), "m", max_tokens=40, ignore_eos=True))
        one.at(at * MS, lambda one=one: one.kill("d1"))
        one.run()
        one.expect()
    assert passed == layers


def test_a_step_that_failed_by_a_known_death_is_sent_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of a step have creditors, of which one dies: the other sequence waits for no news of its own."""
    monkeypatch.setenv("BLOCKZOO_SHAPE", "layers")
    one = Anything(seed=1000, lends=True)
    one.run()
    one.expect_end()
    assert [lost.seqs for *_, lost in one.sent if isinstance(lost, RowsLost) and lost.reason == "d0 is gone"]
