"""The sweep of redundant KV copies: examples, and that no computed page is lost (BL-27)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.kv.duplicates import PERIOD, Copy, due, sweep

OWNER = Copy("s", "m[0:2]", "d0", pages=4, epoch=3, authoritative=True, leased=False, used=0)
SPARE = replace(OWNER, device="d1", authoritative=False)


def reasons(*copies: Copy, now: int = 100, idle: int = 0) -> list[str]:
    return [why for _, why in sweep(copies, now, idle).kept]


def test_a_copy_beside_the_authoritative_one_goes() -> None:
    done = sweep([OWNER, SPARE], 100)
    assert done.dropped == (SPARE,) and done.freed == 4 and done.kept == ((OWNER, "authoritative"),)


def test_what_stays_and_why() -> None:
    assert reasons(SPARE) == ["only"]
    assert reasons(OWNER, replace(SPARE, stage="m[2:4]")) == ["authoritative", "only"]
    assert reasons(OWNER, replace(SPARE, device="d0")) == ["authoritative", "only"]
    assert reasons(OWNER, replace(SPARE, epoch=4)) == ["authoritative", "only"]  # it is becoming the authoritative one
    assert reasons(OWNER, replace(SPARE, leased=True)) == ["authoritative", "leased"]


def test_a_copy_in_use_stays_for_a_while_but_an_old_one_does_not() -> None:
    assert reasons(OWNER, replace(SPARE, used=95), idle=10) == ["authoritative", "used"]
    assert reasons(OWNER, replace(SPARE, used=90), idle=10) == ["authoritative"]
    assert reasons(OWNER, replace(SPARE, used=95, epoch=2), idle=10) == ["authoritative"]


def test_once_a_minute() -> None:
    assert not due(5, 5 + PERIOD - 1) and due(5, 5 + PERIOD)


@given(
    st.lists(
        st.builds(
            Copy,
            st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from("def"), st.integers(1, 9), st.integers(0, 2),
            st.booleans(), st.booleans(), st.integers(0, 100),
        ),
        max_size=10,
    ),
    st.integers(0, 50),
)  # fmt: skip
def test_nothing_computed_is_lost(copies: list[Copy], idle: int) -> None:
    done = sweep(copies, 100, idle)
    assert sorted(map(repr, (*done.dropped, *(copy for copy, _ in done.kept)))) == sorted(map(repr, copies))
    assert not any(copy.authoritative or copy.leased for copy in done.dropped)
    kept = [copy for copy, _ in done.kept]
    for copy in done.dropped:
        assert any(
            (other.seq, other.stage) == (copy.seq, copy.stage)
            and other.device != copy.device
            and other.epoch >= copy.epoch
            for other in kept
        )
    assert sweep(kept, 100, idle).dropped == ()
