"""K and V of sequences that give way, in host memory (QL-10, QL-11): what is kept, and that none is lost or altered.

Every cluster checks pages, host bytes and tokens after each event (`virtual_cluster`); `expect` compares all tokens
with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runtime.config import AgentConfig, ClusterConfig, ControlConfig, OrderConfig, PreemptionMode
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import CloseSequences, OpenSequences, SaveSequences
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2 3* 4 5* 6", max_model_len=512)
ENOUGH = 1 << 20
#: Bytes of a page.
PAGE = 64


def cluster(mode: PreemptionMode = "swap", host: int = ENOUGH, **changes: Any) -> VirtualCluster:
    """A cluster with too few pages for the sequences of `ask`."""
    config = ClusterConfig(devices=changes.get("devices", 1), placement="partition", preemption_mode=mode)
    fields = dict(
        devices=1, pages=150, config=config, agent_config=AgentConfig(host_memory_bytes=host), costs=lambda plan: MS
    )
    return VirtualCluster((M,), **(fields | changes))


def ask(
    made: VirtualCluster, count: int = 4, tokens: int = 80, prompt: Callable[[int], list[int]] | None = None
) -> None:
    for number in range(count):
        text = [number + 1, *range(2, 20)] if prompt is None else prompt(number)
        made.ask(request(f"s{number}", text, max_tokens=tokens, ignore_eos=True), at=number * MS)


def run(made: VirtualCluster) -> Any:
    made.ticks(5 * MS, 900 * MS)
    made.run()
    made.expect()
    return made.scheduler.state().counters


def swapped(made: VirtualCluster) -> list[str]:
    """Return the waiting sequences with a copy."""
    return [each.seq for each in made.scheduler.sequences.values() if each.swapped is not None and not each.path]


def until_swapped(made: VirtualCluster) -> str:
    """Run until a sequence waits with a copy, and return its name."""
    while not swapped(made):
        made.run_one()
    return swapped(made)[0]


@pytest.mark.parametrize("copying", [0, 3 * MS])
def test_what_comes_back_is_not_computed_again(copying: int) -> None:
    """Copies that take time change nothing but time: rows that come meanwhile wait."""
    found = {}
    for mode in ("swap", "recompute"):
        made = cluster(mode, copying=lambda: copying)
        ask(made)
        found[mode] = run(made)
    kept, again = found["swap"], found["recompute"]
    assert kept.preemptions and again.preemptions
    assert kept.swapped_out == kept.swapped_in == kept.preemptions and not kept.swapped_lost
    assert kept.resumed_tokens == 0 < again.resumed_tokens
    assert kept.swapped_tokens > 0 == again.swapped_tokens


def test_without_host_memory_or_with_the_switch_off_nothing_changes() -> None:
    traces = []
    for mode, host in (("recompute", ENOUGH), ("swap", 0), ("auto", 0), ("recompute", 0)):
        made = cluster(mode, host)
        ask(made)
        run(made)
        traces.append(made.trace.text())
        assert not any(isinstance(message, SaveSequences) for *_, message in made.sent)
    assert len(set(traces)) == 1


def test_measurements_decide_from_the_first_copy_on() -> None:
    """Without a profile nothing tells what copies take, so one sequence is kept to measure it."""
    assert auto(copying=0) > 2
    assert auto(copying=100 * MS) == 1, "computing a prompt again takes some steps of 1 ms"


def auto(copying: int) -> int:
    """Return how many sequences `auto` keeps where devices report what copies and chunks took.

    The assumed rate is so low that no copy would ever be made.
    """
    control = ControlConfig(bandwidth=1.0)
    config = ClusterConfig(devices=1, placement="partition", preemption_mode="auto", control=control)
    made = cluster(config=config, copying=lambda: copying)
    for when in range(5 * MS, 900 * MS, 5 * MS):
        made.at(when, lambda: [made.tell(node.agent.report()) for node in made.nodes.values()] and None)
    ask(made, count=6)
    counters = run(made)
    assert counters.preemptions > 2
    return int(counters.swapped_out)


def test_the_assumed_time_of_chunks_decides_until_one_is_measured() -> None:
    made = cluster("auto")
    made.scheduler._state.swapping._costs.add_copy(0, True, 1 << 10, 1e-3)
    made.scheduler._state.swapping._assumed = lambda chain, stage, tokens: 1.0
    ask(made)
    assert run(made).swapped_out > 0
    made = cluster("auto")
    made.scheduler._state.swapping._costs.add_copy(0, True, 1 << 10, 1e-3)
    made.scheduler._state.swapping._assumed = lambda chain, stage, tokens: 1e-12
    ask(made)
    assert run(made).swapped_out == 0


def test_little_memory_keeps_what_fits() -> None:
    made = cluster(host=60 * PAGE)
    ask(made, count=6)
    counters = run(made)
    assert 0 < counters.swapped_out < counters.preemptions
    assert counters.resumed_tokens > 0


def test_all_devices_of_a_path_keep_it_or_none() -> None:
    """The second device has one attention layer, the first two; memory for one layer is not enough."""
    made = cluster(devices=2, pages=100, host=1, cuts=[(4,)])
    ask(made)
    sizes = set()
    while made._heap:
        made.run_one()
        for each in made.scheduler.sequences.values():
            if not each.path and not each.swapped and each.output:
                layers = (2, 1)
                sizes.add(tuple(-(-(each.tokens - 1) // 4) * layer * PAGE for layer in layers))
    made.expect()
    assert sizes
    between = min(small for _, small in sizes) + PAGE
    assert between < min(large for large, _ in sizes)
    made = cluster(devices=2, pages=100, host=between, cuts=[(4,)])
    ask(made)
    counters = run(made)
    assert counters.preemptions > counters.swapped_out == 0
    made = cluster(devices=2, pages=100, cuts=[(4,)])
    ask(made)
    counters = run(made)
    assert counters.swapped_out == counters.swapped_in == counters.preemptions > 0


@pytest.mark.parametrize("copying", [0, 20 * MS])
def test_an_abort_frees_what_host_memory_has(copying: int) -> None:
    made = cluster(copying=lambda: copying)
    ask(made)
    gone = until_swapped(made)
    assert made.scheduler.devices["d0"].host_used > 0
    made.abort(gone, made.now)
    del made.requests[gone]
    counters = run(made)
    assert made.told[gone].last.finish == "abort"
    assert counters.swapped_lost == 1
    assert made.nodes["d0"].host_kv == 0


def test_a_dead_device_means_computing_again() -> None:
    """The other device of the path drops its part."""
    made = cluster(devices=2, pages=100, cuts=[(4,)])
    ask(made)
    gone = until_swapped(made)
    epoch = made.scheduler.sequences[gone].epoch
    made.kill("d1")
    counters = run(made)
    assert counters.swapped_lost >= 1 and counters.resumed_tokens > 0
    closed = [message for _, _, to, message in made.sent if to == "d0" and isinstance(message, CloseSequences)]
    assert any((gone, epoch) in zip(message.seqs, message.epochs, strict=True) for message in closed)


@pytest.mark.parametrize("out", [True, False])
def test_a_copy_that_fails_means_computing_again(out: bool) -> None:
    made = cluster()
    seen: set[str] = set()

    def spoil(key: str) -> bool:
        first = key.split("#")[0] not in seen  # out, then back: under another key
        seen.add(key.split("#")[0])
        return first == out

    made.spoil = spoil
    ask(made)
    counters = run(made)
    assert counters.swapped_lost > 0 and counters.resumed_tokens > 0


def test_an_evicted_sequence_comes_back_from_host_memory() -> None:
    """QL-09 with QL-10: the sequence that gave way goes on from its copy."""
    config = ClusterConfig(max_num_seqs=2, order=OrderConfig("qlm"), preemption_mode="swap")
    made = cluster(config=config, pages=600)
    for number in range(4):
        made.ask(request(f"warm{number}", range(1, 9), max_tokens=20, ignore_eos=True), at=number * 30 * MS)
    for seq in ("b0", "b1"):
        one = request(seq, range(1, 9), max_tokens=200, ignore_eos=True)
        made.ask(replace(one, arrival=200 * MS), at=200 * MS)
    urgent = request("urgent", range(1, 9), max_tokens=20, ignore_eos=True)
    made.ask(replace(urgent, arrival=250 * MS, slo_ms=60), at=250 * MS)
    counters = run(made)
    assert counters.evictions == counters.swapped_out == counters.swapped_in == 1
    assert counters.resumed_tokens == 0


def test_pages_of_a_shared_beginning_are_not_taken_twice() -> None:
    """A sequence comes back beside another one with the same prompt, and shares its pages again."""
    made = cluster(pages=140)
    ask(made, count=4, prompt=lambda number: [1] * 32)
    counters = run(made)
    assert counters.swapped_in > 0
    back = [
        (order.shared[at], order.computed[at])
        for *_, order in made.sent
        if isinstance(order, OpenSequences)
        for at, epoch in enumerate(order.swapped)
        if epoch
    ]
    assert back and all(shared is not None and shared[1] <= computed for shared, computed in back)


def test_prompts_that_are_not_complete_come_back_too() -> None:
    """Scores of the prompt that were not reported yet come from before and from after."""
    config = ClusterConfig(prefill_chunk=4, preemption_mode="swap", prefix_caching="off")
    made = cluster(config=config, pages=60)
    long = [3] * 60
    made.ask(request("first", [1] * 20, max_tokens=30, ignore_eos=True))
    made.ask(request("second", long, max_tokens=3, ignore_eos=True, prompt_logprobs=0), at=MS)
    counters = run(made)
    scores = [part for event in made.told["second"].events for part in event.prompt_logprobs]
    assert counters.swapped_in > 0
    assert min(part.start for part in scores) <= 1
    assert sum(len(part.chosen) for part in scores) == len(long) - 1
