"""Units of the engine in host memory are reported as blocks of the scheduler (UN-04)."""

from __future__ import annotations

from runtime.agent.stages import host_tier
from runtime.agent.stages.host_tier import HostTier
from runtime.chains import Stage
from runtime.messages import SCHEDULER, HostWeights

ONE, TWO = Stage("one", 0, 4), Stage("two", 0, 4)


def tier() -> HostTier:
    """Return a tier with two loaded stages: block `a` of two units is of both, `b` and `c` of two units are not."""
    made = HostTier("d")
    made.expect_stage(ONE, ("a", "b"), (2, 2))
    made.expect_stage(TWO, ("a", "c"), (2, 2))
    made.add_units(ONE.id, ("a1", "a2", "b1", "b2"))
    made.add_units(TWO.id, ("a1", "a2", "c1", "c2"))
    return made


def reported(made: HostTier, units: dict[str, int], *dropped: Stage) -> dict[str, int]:
    sent = list(made.change(units, [stage.id for stage in dropped]))
    assert all(each.to == SCHEDULER for each in sent)
    messages = [each.message for each in sent]
    return {block: size for message in messages if isinstance(message, HostWeights) for block, size in message.blocks}


def test_blocks_are_the_sum_of_their_units_and_only_changes_are_reported() -> None:
    made = tier()
    assert reported(made, {"b1": 10, "b2": 5}, ONE) == {"b": 15}
    assert reported(made, {"a1": 7, "c1": 1}, TWO) == {"a": 7, "c": 1}
    assert reported(made, {"b1": 0}) == {"b": 5}
    assert reported(made, {"b2": 0, "a1": 7}) == {"b": 0}
    assert reported(made, {}) == {}


def test_units_stay_known_while_a_stage_or_host_memory_has_them() -> None:
    made = tier()
    assert reported(made, {"b1": 10, "b2": 5}, ONE) == {"b": 15}
    assert reported(made, {"a1": 3}, TWO) == {"a": 3}
    assert reported(made, {"b1": 0, "b2": 0, "a1": 0}) == {"a": 0, "b": 0}
    assert reported(made, {"a1": 3, "b1": 1}) == {}, "forgotten: no stage has them, nor had host memory"
    assert not made._blocks and not made._sums and not made._unsent


def test_what_is_loaded_again_before_the_drop_of_its_old_self_is_known() -> None:
    made = tier()
    made.expect_stage(ONE, ("a", "b"), (2, 2))
    assert reported(made, {"b1": 10}, ONE) == {"b": 10}
    made.add_units(ONE.id, ("a1", "a2", "b1", "b2"))
    assert reported(made, {"b1": 0}) == {"b": 0}
    assert reported(made, {"b2": 4}, ONE) == {"b": 4}


def test_a_message_is_bounded_and_the_rest_comes_with_the_next(monkeypatch) -> None:
    monkeypatch.setattr(host_tier, "HOST_CHANGES", 2)
    made = HostTier("d")
    stage = Stage("m", 0, 5)
    made.expect_stage(stage, "vwxyz", (1,) * 5)
    made.add_units(stage.id, ("v1", "w1", "x1", "y1", "z1"))
    everything: dict[str, int] = {}
    for units in ({f"{block}1": 3 for block in "vwxyz"}, {}, {}):
        some = reported(made, units)
        assert len(some) <= 2
        everything.update(some)
    assert everything == dict.fromkeys("vwxyz", 3)


def test_blocks_that_do_not_add_up_to_their_stage_are_not_reported() -> None:
    made = HostTier("d")
    made.expect_stage(ONE, ("a", "b"), (2, 1))
    made.add_units(ONE.id, ("a1", "a2", "b1", "b2"))
    made.expect_stage(TWO, ("a", "c"), ())
    made.add_units(TWO.id, ("a1", "a2", "c1", "c2"))
    assert reported(made, {"a1": 5, "b1": 5}, ONE, TWO) == {}


def test_a_unit_that_host_memory_has_already_counts_for_the_blocks_of_later_stages() -> None:
    made = tier()
    assert reported(made, {"b1": 10}) == {"b": 10}
    three = Stage("three", 0, 2)
    made.expect_stage(three, ("d",), (2,))
    made.add_units(three.id, ("b1", "d2"))
    assert reported(made, {}) == {"d": 10}
    assert reported(made, {"b1": 0}) == {"b": 0, "d": 0}


def test_what_is_read_ahead_counts_for_its_blocks_before_any_load() -> None:
    made = HostTier("d")
    made.expect_ahead([ONE, TWO], [("a", "b"), ("a", "c")], [(2, 2), (2, 2)])
    made.expect_stage(ONE, ("a", "b"), (2, 2))  # it is loaded in the meantime
    made.add_read(ONE.id, ("a1", "a2", "b1", "b2"))
    assert reported(made, {"a1": 3, "a2": 3, "b1": 1, "b2": 1}) == {"a": 6, "b": 2}
    made.add_units(ONE.id, ("a1", "a2", "b1", "b2"))
    assert reported(made, {"a1": 0, "a2": 0, "b1": 0, "b2": 0}) == {"a": 0, "b": 0}
    made.expect_ahead([], [], [])
    made.add_read(TWO.id, ("a1", "a2", "c1", "c2"))
    assert reported(made, {"c1": 5}) == {}, "another list came meanwhile"
