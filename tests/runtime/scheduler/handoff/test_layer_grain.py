"""K and V of each layer of a prompt's last chunk travel while its later layers are computed (TI-15).

Pages are read only when they are written (`virtual_layers`), and each goes once. Tokens and bytes are those of the
other grains, and nothing is left on any device.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.control.agent_io import StageStep
from runtime.decode_config import DecodeConfig, HandoffGrain, UntilHandoff
from runtime.messages import PageData, PageRequest, RowsDone, StartMigration
from runtime.role_config import RoleName
from tests.runtime.scheduler.handoff.apart import Apart, run_disturbed
from tests.runtime.scheduler.handoff.test_handoffs import PAIR, moves, reach
from tests.runtime.scheduler.test_scheduler import some
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: From then on all stages are loaded.
READY = 20 * MS
SHAPES: Sequence[tuple[Sequence[RoleName], str]] = (
    (PAIR, "auto"),
    (("prefill", "decode", "decode"), "auto"),
    (("prefill", "decode", "decode"), "partition"),
    (("prefill", "prefill", "decode"), "partition"),
    (("prefill", "prefill", "prefill", "decode", "decode"), "partition"),
)  # fmt: skip


def grained(
    *roles: RoleName, grain: HandoffGrain = "layer", until: UntilHandoff = "rest", chunk: int = 8, **changes: Any
) -> Apart:
    decode = DecodeConfig(grain=grain, until_handoff=until)
    settings = {"decode": decode, "prefill_chunk": chunk, **changes.pop("settings", {})}
    return Apart(*roles, settings=settings, **{"pages": 4000, **changes})


def pieces(cluster: Apart) -> list[tuple[int, PageData]]:
    """Return the messages with pages, with the time (ns) at which each was sent."""
    return [(at, message) for at, *_, message in cluster.sent if isinstance(message, PageData) and not message.error]


def prompt_end(cluster: Apart, seq: str) -> int:
    """Return when the result of a prompt's last row was sent."""
    done = ((at, message) for at, *_, message in cluster.sent if isinstance(message, RowsDone))
    return next(at for at, message in done if seq in message.seqs and message.sampled[message.seqs.index(seq)])


@pytest.mark.parametrize("until", ["rest", "decode"])
@pytest.mark.parametrize(("roles", "placement"), SHAPES)
def test_each_page_goes_once_with_the_bytes_of_one_transfer(
    roles: Sequence[RoleName], placement: str, until: UntilHandoff
) -> None:
    cluster = grained(*roles, until=until, settings={"placement": placement})
    for one in some(64 if roles == PAIR else 24, 3):
        cluster.ask(one, at=READY + random.Random(one.seq).randrange(200 * MS))
    cluster.run()
    cluster.expect()
    went, counters = cluster.handed_off(), cluster.scheduler.state().counters
    assert counters.handoffs_aborted == 0
    if until == "rest":
        cluster.expect_phases()
        assert counters.handoffs == len(went)
        assert counters.handoff_bytes == sum(map(cluster.kv_bytes, went))
        seen = Counter(
            (each.move, token, layer) for _, each in pieces(cluster)
            for token in range(each.lo, each.hi) for layer in range(*each.layers)
        )  # fmt: skip
        assert seen and set(seen.values()) == {1}
    assert any(last - first < 2 for _, each in pieces(cluster) for first, last in [each.layers] if last)


@pytest.mark.parametrize("tokens", [5, 8, 23])
def test_all_layers_but_the_last_ones_are_sent_before_the_prompt_ends(tokens: int) -> None:
    """Also those of a prompt of one chunk; behind the prompt only the answer is waited for, and the commit."""
    waits = {}
    for grain in ("request", "chunk", "layer"):
        cluster = grained(*PAIR, grain=grain, page_bytes_per_ms=2000.0, alpha=3 * MS)  # type: ignore[arg-type]
        cluster.ask(request("a", range(tokens), "m", max_tokens=6), at=READY)
        cluster.run()
        cluster.expect()
        end = prompt_end(cluster, "a")
        if grain == "layer":
            assert [each.layers for _, each in pieces(cluster)][-3:] == [(0, 1), (1, 2), (2, 3)]
            assert all(at < end for at, _ in pieces(cluster))
        done = [at for at, *_, message in cluster.sent if isinstance(message, RowsDone)]
        waits[grain] = min(at for at in done if at > end) - end
    step = 3.01 * MS  # of one token
    assert waits["layer"] < step + 4 * cluster.latency < waits["chunk"], waits


@pytest.mark.parametrize("tokens", [29, 32])
def test_the_first_chunks_go_as_with_the_grain_chunk(tokens: int) -> None:
    cluster = grained(*PAIR)
    cluster.ask(request("a", range(tokens), "m", max_tokens=6), at=READY)
    cluster.run()
    cluster.expect()
    orders = [message for *_, message in cluster.sent if isinstance(message, StartMigration)]
    assert [(each.upto, each.as_written) for each in orders] == [(8, False), (16, False), (24, False), (tokens, True)]


def test_what_has_come_before_the_first_token_is_not_waited_for() -> None:
    """Nor does the sequence decode at its source then, where it would go on until its hand-off."""
    cluster = grained(*PAIR, until="decode")
    cluster.ask(request("a", range(13), "m", max_tokens=9), at=READY)
    cluster.run()
    cluster.expect()
    cluster.expect_phases()
    assert cluster.scheduler.state().counters.handoffs == 1


def test_an_answer_of_one_token_is_not_sent() -> None:
    cluster = grained(*PAIR)
    cluster.ask(request("a", range(8), "m", max_tokens=1), at=READY)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.migrations.counts().started == 0


@pytest.mark.parametrize("caching", ["active", "cached"])
@pytest.mark.parametrize(("roles", "placement"), SHAPES[:4])
def test_prompts_that_share_a_prefix(roles: Sequence[RoleName], placement: str, caching: str) -> None:
    cluster = grained(*roles, settings={"placement": placement, "prefix_caching": caching})
    begins = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]
    gap = MS // 4 if caching == "active" else 3 * MS
    for at in range(16):
        one = request(f"s{at}", [*begins, *range(at, at + 3 + at % 7)], "mn"[at % 2], max_tokens=4 + at)
        cluster.ask(one, at=READY + at * gap)
    cluster.run()
    cluster.expect()
    counters, spared = cluster.scheduler.state().counters, cluster.shared_bytes()
    assert (counters.handoffs, counters.handoffs_aborted) == (16, 0) and counters.shared > 0
    assert (spared or caching == "active") and counters.handoff_bytes == sum(
        map(cluster.kv_bytes, cluster.handed_off())
    ) - spared


def test_agents_that_do_not_show_their_layers_send_all_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, with steps in two lanes or with direct transfers: the request has come by then."""
    monkeypatch.setattr("tests.runtime.scheduler.virtual_layers.watch", lambda *given: None)
    waits = {}
    for grain in ("chunk", "layer"):
        cluster = grained(*PAIR, grain=grain)  # type: ignore[arg-type]
        cluster.ask(request("a", range(20), "m", max_tokens=6), at=READY)
        cluster.run()
        cluster.expect()
        end = prompt_end(cluster, "a")
        done = [at for at, *_, message in cluster.sent if isinstance(message, RowsDone)]
        waits[grain] = min(at for at in done if at > end) - end
        assert pieces(cluster)[-1][0] >= end
        assert cluster.scheduler.state().counters.handoff_bytes == cluster.kv_bytes(cluster.requests["a"])
    assert waits["layer"] < waits["chunk"] - cluster.latency


@pytest.mark.parametrize("victim", ["d0", "d1", "abort"])
@pytest.mark.parametrize("sent", [0, 1, 2, 3])
def test_a_death_or_an_abort_amid_the_layers(victim: str, sent: int) -> None:
    cluster = grained(*PAIR, page_bytes_per_ms=300.0)
    cluster.ask(request("a", range(7), "m", max_tokens=12), request("b", range(30), "n", max_tokens=12), at=READY)
    reach(cluster, lambda: any(isinstance(m, PageRequest) and m.as_written and m.seq == "a" for *_, m in cluster.sent))
    reach(cluster, lambda: sum(each.seq == "a" and each.hi == 7 for _, each in pieces(cluster)) >= sent)
    assert moves(cluster)
    if victim == "abort":
        del cluster.requests["a"]
        cluster.abort("a", cluster.now)
    else:
        cluster.kill(victim)
    cluster.run()
    cluster.expect()
    assert not any(node.agent._by_layer.waiting for node in cluster.living())


@pytest.mark.parametrize("wrong", [1, 2, 7])
def test_pages_that_do_not_verify_are_asked_for_again_with_all_layers(wrong: int) -> None:
    """Layers of the first request that are under way then are dropped."""
    count = iter(range(1000))
    cluster = grained(
        *PAIR, damage=lambda pages: bool(pages.layers[1]) and next(count) in range(1, 1 + wrong), alpha=6 * MS,
        latency=MS,
    )  # fmt: skip
    cluster.ask(request("a", range(7), "m", max_tokens=9), at=READY)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs == 1


def test_a_step_that_fails_amid_the_layers() -> None:
    """What was sent of it is not used: the request ends with its sequence."""
    cluster = grained(*PAIR, page_bytes_per_ms=300.0)
    plain, armed = VirtualCluster._run, [True]

    def run(self: Apart, node: Any, step: StageStep, lane: Any) -> None:
        last = any(row.sample and len(row.tokens) > 1 for row in step.plan.rows)
        if not (last and armed):
            plain(self, node, step, lane)
            return
        armed.clear()
        node.running.add(lane)
        when = self.now

        def fail() -> None:
            node.running.discard(lane)
            self.obey(node, node.agent.fail_step("it was to fail", self.now, lane, retry=True))

        name = next(row.seq for row in step.plan.rows if row.sample)
        # The engine has not seen this plan: as one that failed on it, it may be told to release any of its tables.
        new = [one.request.seq for one in step.plan.opened]
        node.engine._failed.update([*(row.seq for row in step.plan.rows), *new, *step.plan.released])
        self.at(when + MS // 2, lambda: self.obey(node, node.agent.layers_written({name: 2})))
        self.at(when + MS, fail)

    cluster._run = run.__get__(cluster)  # type: ignore[method-assign]
    cluster.ask(request("a", range(7), "m", max_tokens=9), at=READY)
    cluster.run()
    cluster.expect()
    assert not armed and any(each.layers == (0, 2) for _, each in pieces(cluster))


@pytest.mark.parametrize("seed", range(12))
def test_deaths_aborts_short_pages_and_slow_links_at_random(seed: int) -> None:
    rng = random.Random(seed)
    roles, placement = rng.choice(SHAPES)
    cluster = grained(
        *roles, until=rng.choice(("rest", "decode")), chunk=rng.choice((4, 6, 8, 64)),
        pages=rng.choice((70, 120, 400)), page_bytes_per_ms=rng.choice((1e9, 2000.0, 200.0, 30.0)),
        latency=rng.choice((MS // 100, MS // 10, MS // 2)),
        damage=rng.choice((lambda pages: False, lambda pages: rng.random() < 0.1)),
        settings={
            "prefix_caching": rng.choice(("off", "active", "cached")),
            "prefill_order": rng.choice(("off", "sjf")),
            "placement": placement,
        },
    )  # fmt: skip
    run_disturbed(cluster, some(30, seed), len(roles), rng)
