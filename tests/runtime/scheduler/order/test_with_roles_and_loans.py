"""Orders by deadline where prompts and decoding are apart, and where devices lend pages (UN-02)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, ControlConfig, OrderConfig, Plan
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from runtime.lending_config import LendingConfig
from runtime.role_config import RoleName
from tests.runtime.scheduler.anything import Anything
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2 3* 4", max_model_len=1024)
N = counting_model("n", "1* 2 5* 6", max_model_len=1024)
#: Shares nothing with M: the devices below hold one of both.
X = counting_model("x", "7* 8 9* 10", max_model_len=1024)
PAIR: tuple[RoleName, ...] = ("prefill", "decode")


def cluster(
    *roles: RoleName, plan: Plan = "qlm", places: int = 2, pages: int = 600, evict: bool = True, lends: bool = False,
    models: Sequence[IntegerModel] = (M, N), token: float = 0.0,
) -> VirtualCluster:  # fmt: skip
    """Devices whose steps take a millisecond each, so that a token takes as long; `token`: ms per further token."""
    config = ClusterConfig(
        devices=len(roles) or 2, max_num_seqs=places, placement="auto" if roles else "on-demand",
        control=ControlConfig.off(), order=OrderConfig(plan, evict=evict),
        roles=tuple((f"d{at}", role) for at, role in enumerate(roles)),
        lending=LendingConfig("planned", cap=1.0) if lends else LendingConfig(),
    )  # fmt: skip
    return VirtualCluster(
        models, devices=config.devices, pages=pages, config=config, latency=MS // 100,
        costs=lambda plan: MS + int(token * MS) * max(0, plan.tokens - 8),
        limits=(4000,) * config.devices if X in models else (),
    )  # fmt: skip


def ask(
    made: VirtualCluster, seq: str, tokens: int, at: int, slo_ms: int | None = None, prompt: int = 8, model: str = "m"
) -> None:  # fmt: skip
    one = request(seq, [1 + at % 7 for at in range(prompt)], model, max_tokens=tokens, ignore_eos=True)
    made.ask(replace(one, arrival=at, slo_ms=slo_ms), at=at)


def ends(made: VirtualCluster) -> dict[str, float]:
    """Return when each sequence ended, in ms. `expect` compares all tokens with the model's own."""
    made.ticks(10 * MS, 1200 * MS)
    made.run(until=1200 * MS)
    made.expect()
    return {each.seq: each.t / MS for each in made.trace.named("finish")}


def learned(made: VirtualCluster) -> None:
    """Let a few sequences run first, so that the times of prompts and tokens are known."""
    for number in range(4):
        ask(made, f"warm{number}", 20, number * 30 * MS)


def test_devices_for_prompts_and_devices_that_decode_are_one_cell() -> None:
    made = cluster("prefill", "decode", "both")
    ask(made, "a", 5, MS)
    ends(made)
    assert made.scheduler._state.cells is not None
    assert [set(cell.devices) for cell in made.scheduler._state.cells.cells] == [{"d0", "d1", "d2"}]
    assert made.scheduler.order is not None
    assert made.scheduler.order.forecasts.places("d0") == 4, "two on each device that decodes"


def test_prompts_stay_on_devices_for_prompts_where_there_are_several_cells() -> None:
    made = cluster("prefill", "decode", "prefill", "decode", models=(M, X))
    for number in range(12):
        ask(made, f"s{number}", 20, number * MS, 900 + number, model="mx"[number % 2])
    ends(made)
    assert made.scheduler._state.cells is not None
    assert len(made.scheduler._state.cells.cells) == 2
    began = [event for event in made.trace.named("phase") if event.extra["phase"] == "prefill"]
    assert len(began) == 12 and {name for event in began for name in event.extra["at"]} == {"d0", "d2"}


@pytest.mark.parametrize(("plan", "first"), [("off", "a"), ("edf", "b"), ("qlm", "b")])
def test_what_is_due_first_is_handed_off_first(plan: Plan, first: str) -> None:
    made = cluster(*PAIR, plan=plan, places=3, evict=False)
    learned(made)
    for seq in ("x", "y", "z"):
        ask(made, seq, 200, 200 * MS)
    ask(made, "a", 20, 250 * MS, 9000)
    ask(made, "b", 20, 260 * MS, 4000)
    found = ends(made)
    assert min("ab", key=found.__getitem__) == first
    assert min(found["a"], found["b"]) > 400, "the devices that decode were full"


def test_a_decoding_sequence_gives_way_to_an_urgent_hand_off() -> None:
    found = {}
    for evict in (True, False):
        made = cluster(*PAIR, places=3, evict=evict)
        learned(made)
        for seq in ("x", "y", "z"):
            ask(made, seq, 200, 200 * MS)
        ask(made, "urgent", 20, 250 * MS, 80)
        found[evict] = ends(made)["urgent"]
        counters = made.scheduler.state().counters
        assert counters.evictions == counters.preemptions == evict
        assert (counters.slo_met, counters.slo_missed) == ((1, 0) if evict else (0, 1))
        assert {each.cause for each in made.trace.named("batch.preempt")} == ({"QL-09"} if evict else set())
    assert found[True] < 330 and found[False] > 390, found


def test_the_context_of_a_hand_off_is_computed_already() -> None:
    """There is time for the tokens behind it, and none to compute it again."""
    made = cluster(*PAIR, places=3, token=0.2)
    for number in range(6):
        ask(made, f"warm{number}", 20, number * 70 * MS, prompt=8 + 40 * number)
    for seq in ("x", "y", "z"):
        ask(made, seq, 200, 500 * MS)
    ask(made, "urgent", 20, 550 * MS, 76, prompt=208)
    assert ends(made)["urgent"] < 626
    assert made.scheduler.state().counters.evictions == 1


def test_none_gives_way_to_a_hand_off_that_can_wait() -> None:
    made = cluster(*PAIR, places=3)
    learned(made)
    for seq in ("x", "y", "z"):
        ask(made, seq, 200, 200 * MS)
    ask(made, "relaxed", 20, 250 * MS, 600)
    assert ends(made)["relaxed"] < 850
    assert made.scheduler.state().counters.evictions == 0


@pytest.mark.parametrize("evict", [True, False])
def test_what_runs_gives_way_to_an_urgent_sequence_that_starts_with_half_of_the_pages(evict: bool) -> None:
    """It is longer than its device, and borrows the rest: it needs no more to start."""
    made = cluster(pages=100, places=8, evict=evict, lends=True, models=(M, X))
    for number in range(4):
        ask(made, f"warm{number}", 20, 30 * number * MS, prompt=8 + 40 * number)
    ask(made, "running", 300, 200 * MS, prompt=50)
    ask(made, "urgent", 10, 270 * MS, 100, prompt=240)
    found = ends(made)
    assert (made.scheduler.state().counters.evictions == 1) == evict
    assert (found["urgent"] < 370) == evict, found


@pytest.mark.parametrize("evict", [True, False])
def test_what_holds_lent_pages_gives_way_to_an_urgent_sequence_there(evict: bool) -> None:
    """Its loans lie on the device that the urgent one needs, where it runs nothing."""
    made = cluster(pages=150, places=8, evict=evict, lends=True, models=(M, X))
    learned(made)
    for number in range(3):
        ask(made, f"x{number}", 20, (40 + 40 * number) * MS, prompt=80 * (number + 1), model="x")
    ask(made, "long", 300, 200 * MS, prompt=60)
    ask(made, "urgent", 10, 470 * MS, 30, prompt=280, model="x")
    found = ends(made)
    assert {(event.extra["seq"], event.dev) for event in made.trace.named("kv.lend")} >= {("long", "d1")}
    assert made.scheduler.state().counters.evictions == evict
    assert (found["urgent"] < 500) == evict, found


@pytest.mark.parametrize("seed", [*range(2, 40, 4), *range(3, 40, 4)])
def test_whatever_happens_by_deadline_with_roles(seed: int) -> None:
    one = Anything(seed=seed, apart=True, ordered=True)
    one.run()
    one.expect_end()


#: One in which a sequence lends before its first row on the path that it was moved to.
FOUND = 122


@pytest.mark.parametrize("seed", [*range(2, 40, 8), *range(3, 40, 8), FOUND])
@pytest.mark.parametrize("apart", [False, True])
def test_whatever_happens_by_deadline_with_loans(seed: int, apart: bool) -> None:
    one = Anything(seed=seed, apart=apart, lends=True, ordered=True)
    one.run()
    one.expect_end()


def test_schedules_by_deadline_do_have_all_of_it() -> None:
    seen: Counter[str] = Counter()
    for seed in (*range(42, 70, 4), *range(43, 70, 4)):
        one = Anything(seed=seed, apart=True, lends=True, ordered=True)
        one.run()
        one.expect_end()
        counters = one.scheduler.state().counters
        assert one.config.order.by_deadline
        seen["handed off"] += counters.handoffs
        seen["loans"] += counters.loans
        seen["on time"] += counters.slo_met
        seen["late"] += counters.slo_missed
        seen["preempted"] += counters.preemptions
    assert min(seen.values()) > 0 and len(seen) == 5, seen
