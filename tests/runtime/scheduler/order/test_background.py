"""Background sequences in a virtual cluster: what interactive ones lose to them, and that they always go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runtime.config import ClusterConfig, OrderConfig
from runtime.control.scheduler_io import ExpectRequest, PauseSequence
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.order.background import BackgroundRows
from runtime.types import BACKGROUND, SequenceRequest
from tests.runtime.scheduler.order.test_planning import interleave, swapping
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2 3* 4", max_model_len=1024)
N = counting_model("n", "5* 6 7* 8", max_model_len=1024)


def step(plan: Any) -> int:
    """Four milliseconds, and a quarter more for each token."""
    return 4 * MS + sum(len(row.tokens) for row in plan.rows) * MS // 4 if plan.rows else 0


def cluster(share: float, plan: Any = "off", pages: int = 4000) -> VirtualCluster:
    config = ClusterConfig(max_num_seqs=32, background_share=share, order=OrderConfig(plan))
    return VirtualCluster((M,), devices=1, pages=pages, config=config, costs=step, latency=MS // 100)


def line(number: int, tokens: int, at: int) -> SequenceRequest:
    prompt = [1 + (number + each) % 90 for each in range(24)]
    return request(f"line{number}", prompt, max_tokens=tokens, ignore_eos=True, priority=BACKGROUND, arrival=at)


def ask_lines(made: VirtualCluster, count: int, tokens: int, at: int) -> None:
    for number in range(count):
        made.ask(line(number, tokens, at), at=at)


def feed_lines(made: VirtualCluster, count: int, tokens: int, at: int, open_at_once: int = 28) -> None:
    """Ask for lines one after the other, so that as many are open as the server allows."""
    asked = iter(range(count))

    def fill() -> None:
        lines = sum(name.startswith("line") for name in made.scheduler.sequences)
        for number, _ in zip(asked, range(open_at_once - lines), strict=False):
            made.ask(line(number, tokens, made.now), at=made.now)
        if len(made.requests) < count:
            made.at(made.now + 2 * MS, fill)

    made.at(at, fill)


def ask_interactive(made: VirtualCluster, count: int, every: int, at: int, tokens: int = 16, first: int = 0) -> None:
    for number in range(first, first + count):
        prompt = [1 + (7 * number + 3 * each) % 90 for each in range(8)]
        begin = at + (number - first) * every
        made.ask(request(f"i{number}", prompt, max_tokens=tokens, ignore_eos=True, arrival=begin), at=begin)


def took(made: VirtualCluster, until: int) -> list[float]:
    """Return the times of the interactive answers in ms, in order; all answers are there, and the models' own."""
    made.ticks(50 * MS, until)
    made.run(until=until)
    made.expect()
    ends = {each.seq: each.t for each in made.trace.named("finish")}
    return [(ends[seq] - one.arrival) / MS for seq, one in made.requests.items() if seq.startswith("i")]


@pytest.mark.parametrize("plan", ["off", "qlm"])
def test_answers_take_little_longer_beside_lines_of_a_batch(plan: Any) -> None:
    """Alone 70 ms; half of a share of 0.2 is 7 ms in the answer's own steps, and a step of lines takes 14 at most.

    A prompt of a line that is on its way to the device already takes 6 more.
    """
    found = {}
    for share in (0.2, 0.0):
        made = cluster(share, plan)
        made.check = lambda: None  # type: ignore[method-assign]
        ask_interactive(made, 3, 100 * MS, 0)
        ask_interactive(made, 8, 130 * MS, 400 * MS, first=3)
        feed_lines(made, 80, 12, 350 * MS)
        found[share] = took(made, 8000 * MS)
        assert made.scheduler.state().counters.preemptions == 0
    assert max(found[0.2]) < 70 + 7 + 14 + 6
    assert max(found[0.0]) > 4 * 70


def test_lines_go_on_beside_interactive_answers_that_never_pause() -> None:
    """Each step gives a tenth of its time: about a row in six steps."""
    made = cluster(0.1)
    ask_interactive(made, 4, 20 * MS, 0, tokens=700)
    ask_lines(made, 8, 20, 100 * MS)
    made.ticks(50 * MS, 2500 * MS)
    made.run(until=2500 * MS)
    assert all(made.told[f"i{number}"].last.finish is None for number in range(4))
    tokens = sum(len(made.told[f"line{number}"].tokens) for number in range(8))
    steps = len(made.told["i0"].tokens)
    assert 0.05 * steps < tokens < 0.6 * steps
    made.ticks(50 * MS, 20_000 * MS)
    made.run(until=20_000 * MS)
    made.expect()


def test_a_step_of_lines_is_short_while_requests_come_now_and_then() -> None:
    """An answer takes 70 ms alone, so such a step takes 14 at most, and one more prompt; a minute later it is full."""
    made, steps = cluster(0.2), list[tuple[int, int]]()

    def timed(plan: Any) -> int:
        steps.append((made.now // MS, step(plan)))
        return step(plan)

    made.costs = timed
    ask_interactive(made, 5, 100 * MS, 0)
    ask_lines(made, 28, 6, 600 * MS)
    for number in range(28, 56):
        made.ask(line(number, 6, 70_000 * MS), at=70_000 * MS)
    took(made, 72_000 * MS)
    beside = [each for at, each in steps if 600 <= at < 60_000]
    assert len(beside) > 12 and max(beside[5:]) <= 20 * MS, "after a few, what prompts take is known"
    assert max(each for at, each in steps if at >= 60_000) > 100 * MS


def test_a_line_that_comes_behind_a_request_waits_for_the_next_look_at_what_is_spare() -> None:
    made, both = cluster(0.3), list[str]()

    def seen(plan: Any) -> int:
        prompts = [row.seq for row in plan.rows if len(row.tokens) > 1]
        if any(seq.startswith("i") for seq in prompts):
            both.extend(seq for seq in prompts if seq.startswith("line"))
        return step(plan)

    made.costs = seen
    ask_interactive(made, 5, 100 * MS, 0)
    ask_lines(made, 2, 40, 600 * MS)
    ask_interactive(made, 1, 0, 651 * MS, first=5)
    made.ask(line(2, 8, 651 * MS), at=651 * MS + 1000)
    took(made, 5000 * MS)
    assert not both


@pytest.mark.parametrize("kind", ["decode", "prompts", "chunks", "paused"])
def test_no_step_of_lines_begins_while_a_request_is_prepared(kind: str) -> None:
    """They go on once it has ended; one that was announced and does not come holds them for 50 ms, until a tick."""
    made, steps = cluster(0.2), list[int]()
    rows: dict[int, set[str]] = {}

    def seen(plan: Any) -> int:
        if plan.rows:
            steps.append(made.now // MS)
            rows[made.now // MS] = {row.seq[:2] for row in plan.rows}
        return step(plan)

    def begun(since: int, until: int) -> int:
        return sum(since <= at < until for at in steps)

    made.costs = seen
    ask_interactive(made, 5, 100 * MS, 0)
    if kind in ("decode", "paused"):
        ask_lines(made, 4, 200, 600 * MS)
    elif kind == "prompts":
        feed_lines(made, 2000, 1, 600 * MS, open_at_once=2)
    else:
        made.scheduler._state.config = replace(made.scheduler._state.config, prefill_chunk=8)
        long = request("line0", [1] * 1000, max_tokens=4, ignore_eos=True, priority=BACKGROUND, arrival=600 * MS)
        made.ask(long, at=600 * MS)
    if kind == "paused":
        made.ask(request("another", [1] * 8, max_tokens=20, ignore_eos=True, arrival=700 * MS), at=700 * MS)
        made.at(750 * MS, lambda: made.tell(PauseSequence("another", None)))
    made.at(1000 * MS, lambda: made.tell(ExpectRequest("r-i5")))
    ask_interactive(made, 1, 0, 1031 * MS, tokens=1, first=5)
    made.at(1200 * MS, lambda: made.tell(ExpectRequest("refused")))
    made.ticks(50 * MS, 1400 * MS)
    made.run(until=1400 * MS)
    assert begun(970, 1000) and begun(1000, 1005) <= 1 and not begun(1012, 1031) and begun(1031, 1033) == 1
    assert rows[1031] == {"i5"}, "lines do not go on in the moment before it is on the device"
    assert begun(1033, 1050) and begun(1170, 1200) and not begun(1212, 1250) and begun(1300, 1350) > 4


@pytest.mark.parametrize("how", ["refused", "refused by the scheduler", "elsewhere"])
def test_lines_go_on_at_once_where_a_request_that_was_announced_does_not_run(how: str) -> None:
    """Before the next tick. One of another model runs on another device."""
    config = ClusterConfig(max_num_seqs=32, background_share=0.2, devices=2, placement="partition")
    made = VirtualCluster((M, N), devices=2, pages=4000, config=config, costs=step, latency=MS // 100)
    begun: list[int] = []

    def seen(plan: Any) -> int:
        if any(row.seq.startswith("line") for row in plan.rows):
            begun.append(made.now)
        return step(plan)

    made.costs = seen
    ask_interactive(made, 5, 100 * MS, 0)
    ask_lines(made, 4, 200, 600 * MS)
    made.at(1005 * MS, lambda: made.tell(ExpectRequest("r-other")))
    if how == "refused":
        made.at(1030 * MS, lambda: made.tell(ExpectRequest("r-other", comes=False)))
    else:
        model = "n" if how == "elsewhere" else "none"
        other = request("other", [1, 2, 3], model=model, max_tokens=1, ignore_eos=True, arrival=1030 * MS)
        made.ask(other, at=1030 * MS)
    made.ticks(50 * MS, 1200 * MS)
    made.run(until=1200 * MS)
    assert made.told["line0"].events and (how != "elsewhere" or made.told["other"].last.finish == "length")
    during = [at for at in begun if 1012 * MS <= at < 1050 * MS]
    assert during and 1030 * MS <= during[0] < 1037 * MS, "not before, and without a tick"


@pytest.mark.parametrize("cuts", [(), (2,)])
def test_lines_go_on_while_requests_are_announced_that_never_come(cuts: tuple[int, ...]) -> None:
    """A flood of requests that are refused: a step of lines about every 100 ms."""
    config = ClusterConfig(max_num_seqs=32, background_share=0.2, devices=1 + len(cuts), placement="partition")
    many = 1 + len(cuts)
    made = VirtualCluster((M,), (cuts,), devices=many, pages=4000, config=config, costs=step, latency=MS // 100)
    ask_interactive(made, 5, 100 * MS, 0)
    ask_lines(made, 3, 200, 600 * MS)
    made.ask(line(3, 2, 2000 * MS), at=2000 * MS)
    for number in range(400):
        made.at((1000 + 10 * number) * MS, lambda number=number: made.tell(ExpectRequest(f"r-{number}")))
    made.ticks(50 * MS, 5000 * MS)
    before: dict[str, int] = {}
    made.at(1010 * MS, lambda: before.update(first=len(made.told["line0"].tokens)))
    made.run(until=5000 * MS)
    assert 20 <= len(made.told["line0"].tokens) - before["first"] <= 80
    assert made.told["line3"].last.finish == "length", "they begin, too"


def test_a_request_that_is_refused_as_late_holds_no_line_of_a_batch_up() -> None:
    """It was announced: lines go on as soon as it is refused, without a tick."""
    made, begun = swapping(overload="reject", share=0.2), list[int]()

    def seen(plan: Any) -> int:
        if plan.rows:
            begun.append(made.now)
        return MS

    made.costs = seen
    interleave(made, 12)
    line = request("line", (1, 2, 3), "m0", max_tokens=50, ignore_eos=True, priority=BACKGROUND, arrival=5_000 * MS)
    made.ask(line, at=5_000 * MS)
    made.at(5_110 * MS, lambda: made.tell(ExpectRequest("r-late")))
    late = request("late", (1, 2, 3), "m0", max_tokens=4, ignore_eos=True, arrival=5_130 * MS)
    made.ask(replace(late, slo_ms=1), at=5_130 * MS)
    made.ticks(50 * MS, 6_000 * MS)
    made.run(until=6_000 * MS)
    assert made.told["late"].last.finish == "error"
    during = [each // MS for each in begun if 5_112 * MS <= each < 5_150 * MS]
    assert during and 5_130 <= during[0] <= 5_132


def test_a_line_begins_where_nothing_runs_and_requests_are_announced_that_never_come() -> None:
    made = cluster(0.2)
    made.ask(line(0, 2, 100 * MS), at=100 * MS)
    for number in range(400):
        made.at((1000 + 10 * number) * MS, lambda number=number: made.tell(ExpectRequest(f"r-{number}")))
    made.ask(line(1, 2, 2005 * MS), at=2005 * MS)
    made.ticks(50 * MS, 3000 * MS)
    made.run(until=2050 * MS)
    assert not made.told["line1"].events
    made.run(until=3000 * MS)
    assert made.told["line1"].last.finish == "length"


def test_lines_go_on_beside_short_answers_of_which_the_next_is_always_announced() -> None:
    """Neither are their rows paid beside steps that are not followed by others, nor do they find a moment alone."""
    made = cluster(0.2)
    ask_interactive(made, 5, 100 * MS, 0)
    ask_lines(made, 3, 200, 600 * MS)
    for number in range(5, 305):
        at = (1000 + 10 * (number - 5)) * MS
        made.at(at - 5 * MS, lambda number=number: made.tell(ExpectRequest(f"r-i{number}")))
        ask_interactive(made, 1, 0, at, tokens=1, first=number)
    made.ticks(50 * MS, 4000 * MS)
    before: dict[str, int] = {}
    made.at(1010 * MS, lambda: before.update(first=len(made.told["line0"].tokens)))
    made.run(until=4000 * MS)
    assert len(made.told["line0"].tokens) - before["first"] >= 15


def test_lines_begin_beside_answers_however_often_requests_are_announced() -> None:
    """A line's prompt is paid from the share beside an interactive answer: announcements do not hold it."""
    made = cluster(0.5)
    ask_interactive(made, 2, 20 * MS, 0, tokens=900)
    for number in range(400):
        made.at((100 + 10 * number) * MS, lambda number=number: made.tell(ExpectRequest(f"r-{number}")))
    ask_lines(made, 4, 4, 500 * MS)
    made.ticks(50 * MS, 4000 * MS)
    made.run(until=4000 * MS)
    assert all(made.told[f"line{number}"].last.finish for number in range(4))


@pytest.mark.parametrize("how", ["paused", "aborted"])
def test_a_request_that_is_paused_or_gone_does_not_keep_lines_back(how: str) -> None:
    made = cluster(0.001)
    ask_interactive(made, 1, 0, 0, tokens=200)
    ask_lines(made, 8, 20, 300 * MS)
    if how == "paused":
        made.at(500 * MS, lambda: made.tell(PauseSequence("i0", None)))
    else:
        made.abort("i0", at=500 * MS)
    made.ticks(50 * MS, 4000 * MS)
    made.run(until=4000 * MS)
    assert all(made.told[f"line{number}"].last.finish == "length" for number in range(8))
    assert (made.told["i0"].last.finish is None) == (how == "paused")


def test_a_line_that_was_left_out_goes_on_where_it_was_moved_to() -> None:
    """On a device with no step since: its row would never return."""
    made = cluster(0.1)
    ask_lines(made, 1, 60, 0)
    made.run(until=50 * MS)
    state, moved = made.scheduler._state, made.scheduler._state.running["line0"]
    moved.stay_behind(True)
    rows = BackgroundRows(state, 0.1)
    rows.review_all(made.now)
    rows.review(made.now)
    assert not moved.waits.behind


def test_lines_give_their_pages_to_interactive_answers() -> None:
    made = cluster(0.1, pages=300)
    ask_lines(made, 12, 60, 0)
    ask_interactive(made, 6, 30 * MS, 200 * MS, tokens=120)
    took(made, 60_000 * MS)
