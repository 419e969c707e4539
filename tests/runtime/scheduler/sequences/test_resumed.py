"""Sequences that arrive with tokens produced before: the rest of the answer is the same, wherever it was cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.chains import Surrogate
from runtime.config import ClusterConfig, PrefixCaching, SpeculationConfig
from runtime.control.request_checks import refusal
from runtime.engine.fakes.integer_model import counting_model, expected, surrogate_of
from runtime.messages import OpenSequences
from runtime.types import SequenceRequest
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request, spec

M = counting_model("m", "1* 2 3* 4* 5 6", max_model_len=64, eos_token_ids=(9,))
PROMPT = tuple(range(3, 14))
ASKED = request("whole", PROMPT, "m", max_tokens=12, logit_bias=((7, -100.0),), min_tokens=4, logprobs=2)
ANSWER = expected(M, ASKED.prompt, ASKED.sampling)


def cut(at: int, of: SequenceRequest = ASKED) -> SequenceRequest:
    """Return the request as it goes on behind its first `at` tokens."""
    return replace(of, seq=f"cut-{at}", output=tuple(ANSWER[:at]))


def cluster(devices: int, sharing: PrefixCaching = "off", pages: int = 256) -> VirtualCluster:
    config = ClusterConfig(devices=devices, placement="partition", prefix_caching=sharing, prefill_chunk=5)
    return VirtualCluster([M], [(3,)], devices=devices, config=config, pages=pages)


@pytest.mark.parametrize("sharing", ["off", "active", "cached"])
@pytest.mark.parametrize("devices", [1, 2])
def test_every_cut_gives_the_rest(devices: int, sharing: PrefixCaching) -> None:
    one = cluster(devices, sharing)
    assert len(ANSWER) == 12
    for at in range(len(ANSWER)):
        one.ask(cut(at), at=at % 4 * 3 * MS)
    one.run()
    one.expect()  # `told` begins with the produced tokens, and checks the index of every event
    for at in range(len(ANSWER)):
        events = one.told[f"cut-{at}"].events
        assert [event.index for event in events] == list(range(at, len(ANSWER)))
        assert all(event.logprob is not None and len(event.top) == 2 for event in events)
    assert one.scheduler.state().counters.generated_tokens == sum(range(1, len(ANSWER) + 1))


def test_produced_tokens_run_as_prompt_and_travel_once() -> None:
    one = cluster(2)
    one.ask(cut(5))
    one.run()
    one.expect()
    opened = [message for _, _, _, message in one.sent if isinstance(message, OpenSequences)]
    assert {each.outputs for each in opened} == {(tuple(ANSWER[:5]),)}
    assert all(not each.requests[0].output for each in opened)
    assert one.scheduler.state().counters.resumed_tokens == len(PROMPT) + 5
    assert [event.n for event in one.trace.named("batch.resume")] == [len(PROMPT) + 5]
    assert not one.trace.named("batch.insert")


def test_it_is_preempted_and_survives_devices() -> None:
    one = cluster(2, pages=40)
    for at in range(len(ANSWER)):
        one.ask(cut(at))
    one.at(9 * MS, lambda: one.kill("d1"))
    one.run()
    one.expect()
    assert one.trace.named("batch.preempt")


def test_it_moves_between_devices() -> None:
    rng = random.Random(3)
    one = VirtualCluster([M], [(3,)], devices=2, config=ClusterConfig(devices=2, placement="replicate"))
    for at in range(len(ANSWER)):
        one.ask(cut(at))
    for when in range(2, 14):
        one.at(when * MS, lambda: one.migrate_some(rng) and None)
    one.run()
    one.expect()
    assert one.trace.named("kv.meet") or one.trace.named("kv.copy"), {each.ev for each in one.trace.events}


def test_speculation_goes_on_behind_produced_tokens() -> None:
    stand_in = surrogate_of(M, "m~", 3, 3)
    one = VirtualCluster(
        [M], [(2, 4)], devices=3, stand_ins=[stand_in], surrogates={"m": [Surrogate("m~", 3, 4, 1)]},
        config=ClusterConfig(devices=3, placement="partition", speculation=SpeculationConfig("exact", top=0.5)),
    )  # fmt: skip
    for at in range(len(ANSWER)):
        one.ask(cut(at))
    one.run()
    one.expect()


def test_its_end_is_the_end_of_the_whole_answer() -> None:
    stops = replace(ASKED, sampling=replace(ASKED.sampling, stop_token_ids=(ANSWER[7],), min_tokens=0))
    first = ANSWER.index(ANSWER[7])
    one = cluster(1)
    for at in range(first + 1):
        one.ask(cut(at, stops))
    one.run()
    one.expect()
    assert all(told.last.finish == "stop" and told.last.index == first for told in one.told.values())


def test_what_cannot_go_on_is_refused() -> None:
    def why(output: tuple[int, ...], prompt: tuple[int, ...] = (1, 2, 3)) -> str | None:
        return refusal(replace(request("a", prompt, max_tokens=4), output=output), spec(eos_token_ids=(7,)))

    assert why((1, 2, 3)) is None
    assert "max_tokens is 4" in (why((1, 2, 3, 4)) or "")
    assert "must lie in [0, 97)" in (why((1, 97)) or "")
    assert "has ended" in (why((1, 7)) or "")
    assert why((7, 1)) is None
    assert "leaves no room" in (why((1, 2, 3), (1,) * 61) or "")
    assert why((1, 2, 3), (1,) * 60) is None
    one = cluster(1)
    one.ask(replace(ASKED, output=tuple(ANSWER)))
    one.run()
    last = one.told["whole"].last
    assert (last.index, last.token, last.finish) == (len(ANSWER), None, "error")
    one.expect_empty()
