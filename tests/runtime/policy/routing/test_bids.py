"""Each hop gets exactly one accepted bid, in whatever order answers come (BL-23)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.routing.bids import Accepted, BidRefused, Bids


def test_the_first_wins_the_others_are_cancelled_and_late_ones_refused() -> None:
    bids = Bids()
    bids.offer("h", ["a", "b", "c"])
    assert bids.accept("h", "b") == Accepted("b", cancel=("a", "c"))
    assert bids.accept("h", "a") == BidRefused("b has it") == bids.accept("h", "b")
    bids.close("h")
    bids.close("h")
    assert bids.accept("h", "c") == BidRefused("there is no such offer") and len(bids) == 0


def test_strangers_are_refused_and_names_are_used_once() -> None:
    bids = Bids()
    bids.offer("h", ["a"])
    assert bids.accept("h", "x") == BidRefused("it was not asked")
    for hop, devices in (("h", ["a"]), ("g", [])):
        with pytest.raises(ValueError):
            bids.offer(hop, devices)


def test_when_all_decline_or_are_gone_it_is_offered_anew() -> None:
    bids = Bids()
    bids.offer("h", ["a", "b"])
    bids.offer("g", ["b", "c"])
    assert not bids.decline("h", "a").exhausted and bids.decline("h", "a").reason == "there is no such offer"
    assert isinstance(bids.accept("g", "b"), Accepted)
    assert bids.remove_device("b") == ("h", "g")  # the last candidate of one offer, and the winner of the other
    assert len(bids) == 0 and bids.remove_device("b") == ()
    bids.offer("h", ["c"])


def test_whoever_declines_after_another_won_changes_nothing() -> None:
    bids = Bids()
    bids.offer("h", ["a", "b"])
    assert isinstance(bids.accept("h", "a"), Accepted)
    assert not bids.decline("h", "b").exhausted
    assert bids.accept("h", "b") == BidRefused("a has it")


@given(
    st.lists(
        st.tuples(st.sampled_from(["accept", "decline"]), st.sampled_from("gh"), st.sampled_from("abcx")), max_size=20
    )
)
def test_never_two_winners(answers: list[tuple[str, str, str]]) -> None:
    bids, winners = Bids(), dict.fromkeys("gh", "")
    for hop in "gh":
        bids.offer(hop, ["a", "b", "c"])
    for verb, hop, device in answers:
        if verb == "accept" and isinstance(answer := bids.accept(hop, device), Accepted):
            assert not winners[hop] and device in "abc" and device not in answer.cancel
            winners[hop] = device
        elif verb == "decline" and bids.decline(hop, device).exhausted:
            assert winners[hop] in ("", device)
            winners[hop] = "gone"
