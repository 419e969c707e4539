"""Parts of a sequence's record: what it waits for, its open hops, and what is left when it runs nowhere."""

from __future__ import annotations

from runtime.chains import Hop, RunAhead, Stage
from runtime.control.sequence import Rank
from runtime.scheduler.sequences.parts import FREE, SETTLED, Failures, Offered
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.types import ModelSpec, SamplingParams, SequenceRequest

SPEC = ModelSpec("m", 2, 128, 4, 0)


def sequence() -> ScheduledSequence:
    return ScheduledSequence(SequenceRequest("s", "r", "m", (1, 2, 3), SamplingParams(8)), SPEC, Rank(0, 0, 0))


def test_a_sequence_that_waits_for_nothing_says_so_with_one_object() -> None:
    """Rows are issued at once only for that very object; an equal one would take the long way."""
    one = sequence()
    for begin, end in (
        (lambda: one.pause(5), lambda: one.pause(None)),
        (lambda: one.moves(3), lambda: one.moves(0)),
        (lambda: one.hold(True), lambda: one.hold(False)),
        (lambda: one.doom("pages"), one.unseated),
    ):
        begin()
        assert one.waits is not FREE
        end()
        assert one.waits is FREE


def test_the_end_of_a_move_ends_what_was_held_for_it_and_no_pause() -> None:
    one = sequence()
    one.pause(7)
    one.moves(3)
    one.hold(True)
    assert (one.waits.paused, one.waits.move, one.waits.held) == (7, 3, True)
    one.moves(0)
    assert (one.waits.paused, one.waits.move, one.waits.held) == (7, 0, False)
    one.doom("pages")
    one.unseated()
    assert (one.waits.paused, one.waits.doomed) == (7, ""), "a pause outlasts the place"


def test_what_runs_nowhere_holds_nothing_but_what_it_has_made() -> None:
    one = sequence()
    one.path, one.flying, one.failures = (Hop("a", 0, 2, (0, 2)),), True, Failures(deaths=1)
    one.place.weights, one.place.devices = (("a", 2),), frozenset("a")
    one.holds(3)
    one.output.append(4)
    one.predict(RunAhead(0, Stage("n", 0, 1), None), "a", 1)
    assert one.place.weights == (("a", 3),) and one.shared.tentative and one.pages.room == 3 * SPEC.page_tokens
    one.unseated()
    assert (one.path, one.place.weights, one.place.devices) == ((), (), frozenset())
    assert (one.pages.groups, one.pages.room, one.flying, one.shared.tentative) == (0, 0, False, False)
    assert one.predicted is None and one.ahead is None and one.offered is SETTLED
    assert one.output == [4] and one.failures == Failures(deaths=1), "deaths count until its next token"


def test_open_hops_lose_their_devices_when_they_are_taken_or_die() -> None:
    offered = Offered({1: ("b", "c", "d"), 2: ("e", "f")}, {"c": 1, "d": 1, "f": 2})
    assert offered.without("c") == Offered({1: ("b", "d"), 2: ("e", "f")}, {"d": 1, "f": 2})
    assert offered.settled(1) == Offered({2: ("e", "f")}, {"f": 2})
    assert offered.settled(1).settled(2) == SETTLED


def test_a_device_that_may_take_a_hop_sees_the_path_with_itself_on_it() -> None:
    one = sequence()
    one.path = (Hop("a", 0, 1, (0, 1)), Hop("b", 1, 3, (1, 3)))
    one.offer({1: ("b", "c")})
    assert one.path_on("c") == (one.path[0], Hop("c", 1, 3, (1, 3))) and one.path_on("b") == one.path
    assert one.spare == (("c", 2),) == one.place.weights
