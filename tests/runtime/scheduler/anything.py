"""Random schedules that combine all mechanisms; one seed gives one schedule.

They combine few pages, moves, deaths, aborts, pauses, shared prefixes, speculated hops, new versions, scaling,
balancing, placement, pages that fail verification, links of all speeds, deadlines, sequences that arrive with tokens,
host memory for K and V: too little or enough, with copies that take time or fail, and prompts in chunks of several.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from runtime.chains import Surrogate
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, OrderConfig, SpeculationConfig
from runtime.control.scheduler_io import AddRequest, PauseSequence, ResumeSequence, ServeModel, Tick
from runtime.decode_config import DecodeConfig, UntilHandoff
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel, counting_model, expected, surrogate_of
from runtime.lending_config import LendingConfig, LendingMode, LoanShape
from runtime.role_config import RoleName
from runtime.types import SequenceRequest
from tests.runtime.scheduler.changing import Changing, as_version, serve
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import Told, request

#: A small vocabulary, so that a wrong prediction often gives the right token. N shares most of M; P and Q are later
#: versions of it.
M, N, P, Q = (
    counting_model(name, parts, vocab_size=3, max_model_len=96)
    for name, parts in (
        ("m-1", "1* 2 3* 4* 5 6* 7 8"),
        ("n-1", "1* 2 3* 4* 5 6* 9 10"),
        ("m-2", "1* 2 3* 14* 5 6* 7 18"),
        ("m-3", "1* 2 13* 4* 5 6* 7 28"),
    )
)
CUT = (2, 5)
KNOWN = (M, N, P, Q)
#: Time (ns) until which clock ticks come.
END = 600 * MS


@dataclass
class Anything(Changing):
    """A cluster whose schedule is drawn from its seed. `expect` checks the sequences that were not aborted."""

    seed: int = 0
    #: Host memory: 0 for none, 1 for little, 2 for enough; None: drawn.
    host: int | None = None
    #: Whether devices have roles; then no hop is predicted or offered.
    apart: bool = False
    #: Whether devices lend pages; then no hop is offered, and none is predicted unless `predicts`.
    lends: bool = False
    predicts: bool = False
    #: Whether sequences with roles or loans may be ordered by deadline.
    ordered: bool = False
    mode: LendingMode = "planned"

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        predicted = self.seed % 3 == 0  # switch off what keeps hops from being speculated
        self.devices = 3 if predicted else rng.choice((2, 3, 4))
        self.pages, self.latency = rng.choice((70, 90, 150, 400)), rng.choice((MS // 100, MS // 10, MS // 3))
        self.page_bytes_per_ms = rng.choice((1e9, 1000.0, 200.0, 50.0))
        self.restart = rng.choice((5, 50)) * MS
        self.agent_config = AgentConfig(
            recompute_chunk=rng.choice((4, 16, 64)),
            fetch_window=rng.choice((1, 2, 4)),
            page_timeout_ms=rng.choice((50, 2000)),
            activation_cache_bytes=(0, 2000, 1 << 20)[self.seed // 3 % 3],
        )
        self.servers = rng.choice(((), tuple("xxyy"[: self.devices])))
        self.config = replace(_config(rng, self.devices, predicted), dispatch=("placed", "broadcast")[self.seed % 2])
        if self.seed % 4:
            order = OrderConfig(("fcfs", "edf", "qlm")[self.seed % 4 - 1], soft_deadline_ms=40)
            self.config = replace(self.config, order=order, max_num_seqs=(2, 3, 256)[self.seed // 4 % 3])
        prompts = random.Random(f"{self.seed} prompts")
        self.config = replace(
            self.config, prefill_order=prompts.choice(("off", "off", "fcfs", "sjf", "ljf")), prefill_window=2
        )
        if (self.apart or self.lends) and not self.ordered and self.config.order.by_deadline:
            self.config = replace(self.config, order=OrderConfig())
        if self.apart:
            self.config = _with_roles(self.config, random.Random(f"{self.seed} roles"))
        if self.lends:
            self.config = _with_loans(self.config, random.Random(f"{self.seed} loans"), self.mode, self.predicts)
            self.pages = random.Random(f"{self.seed} pages").choice((70, 70, 90, self.pages))
        self.lanes = rng.choice((("all",), ("all",), ("real", "ahead")))
        self.costs = lambda plan: rng.choice((MS // 4, MS, 2 * MS))
        if rng.random() < 0.3:
            self.damage = lambda pages: rng.random() < 0.2
        self.known, self.chains = KNOWN, [as_version(M, "m", *CUT), as_version(N, "n", *CUT)]
        self.blocks = [block for model in KNOWN for block in model.blocks(*CUT)]
        stand_in = surrogate_of(M, "m~", 4, rng.choice((0, 2, 5)))
        self.surrogates = {"m": [Surrogate("m~", 4, 5, 1)]}
        self.make_engine = lambda name: IntegerEngine([*KNOWN, stand_in], self.pages, device=name, rewrites=True)
        self._draw_host_memory(random.Random(f"{self.seed} host"))
        super().__post_init__()
        self.scheduler.speculation.pin([(M.chain(*CUT).uses[1].block, f"d{at}") for at in range(self.devices)])
        self._plan(rng, () if predicted else rng.choice(((), (P,), (P, Q))))

    def _draw_host_memory(self, rng: random.Random) -> None:
        """Give two in three clusters host memory for K and V of sequences that give way."""
        limit = (0, rng.choice((1000, 4000)), 1 << 20)[self.seed % 3 if self.host is None else self.host]
        self.agent_config = replace(self.agent_config, host_memory_bytes=limit)
        self.config = replace(self.config, preemption_mode=rng.choice(("swap", "auto")))
        slowest = rng.choice((0, MS // 2, 5 * MS))
        self.copying = lambda: rng.randrange(slowest + 1)
        if rng.random() < 0.3:
            self.spoil = lambda key: rng.random() < 0.2

    def tell(self, event: Any) -> None:
        """As in the base; a quarter of the sequences arrive with the first tokens of their answers."""
        if isinstance(event, AddRequest) and event.request.seq in self.requests:
            rng, one = random.Random(f"{self.seed} {event.request.seq}"), event.request
            if rng.random() < 0.25 and (chain := self.scheduler._state.chains.get(one.model)) is not None:
                model = next(each for each in self.known if each.spec.name == chain.loaded_as)
                answer = expected(model, one.prompt, one.sampling)
                one = replace(one, output=tuple(answer[: rng.randrange(len(answer))]))
                self.told[one.seq], event = Told(list(one.output)), AddRequest(one)
        super().tell(event)

    def _plan(self, rng: random.Random, versions: Sequence[IntegerModel]) -> None:
        within = rng.choice((20, 60, 150)) * MS
        self.ask(request("warm", (1,), "m", max_tokens=1))
        for number, one in enumerate(asked(rng, rng.randrange(6, 22))):
            at = rng.randrange(within)
            self.ask(replace(one, arrival=at, slo_ms=(None, 2, 10, 30)[number % 4]), at=at)
        for _ in range(rng.choice((0, 0, 40))):
            self.at(rng.randrange(150 * MS), lambda: self.migrate_some(rng) and None)
        for _ in range(rng.choice((0, 2, 5))):
            self.at(rng.randrange(150 * MS), lambda: self.kill(f"d{rng.randrange(self.devices)}"))
        self._interrupt(rng)
        if self.lends:
            self._kill_creditors(random.Random(f"{self.seed} deaths"))
        for model in versions:
            self.at(rng.randrange(100 * MS), lambda model=model: self.tell(_serve(model)))
        # Searches for creditors in vain are repeated, after pauses.
        self.ticks(rng.choice((2, 5)) * MS, 4 * END if self.mode == "negotiated" else END)

    def _interrupt(self, rng: random.Random) -> None:
        """Pause some sequences for a while and abort some."""
        paused, gone = rng.choice((0.0, 0.3)), rng.choice((0.0, 0.2))
        for seq in tuple(self.requests):
            if rng.random() < paused:
                begin = rng.randrange(100 * MS)
                self.at(begin, lambda seq=seq: self.tell(PauseSequence(seq)))
                self.at(begin + rng.randrange(150 * MS), lambda seq=seq: self.tell(ResumeSequence(seq)))
            elif rng.random() < gone:
                self.abort(seq, rng.randrange(120 * MS))
                del self.requests[seq]

    def _kill_creditors(self, rng: random.Random) -> None:
        """Let up to three devices die while they hold pages for other ones, some shortly after each other."""
        most = iter(range(rng.choice((0, 1, 3))))

        def kill() -> None:
            loans = list(self.scheduler.lending.loans)
            if loans and next(most, None) is not None:
                self.kill(rng.choice(loans).creditor)

        for _ in range(8):
            at = rng.randrange(5 * MS, 200 * MS)
            self.at(at, kill)
            self.at(at + rng.randrange(3 * MS), kill)

    def expect_end(self) -> None:
        """Assert that every sequence finished and, once cached prefixes are dropped, nothing is left on any device."""
        self.scheduler.prefix_cache.clear()
        self.carry_out(self.scheduler.handle(Tick(), self.now))
        self.run()
        assert all(told.last.finish for told in self.told.values())
        self.expect()


def asked(rng: random.Random, count: int) -> list[SequenceRequest]:
    """Return requests for both models, of two tenants, whose prompts share a few prefixes."""
    systems = [[rng.randrange(3) for _ in range(length)] for length in (0, 8, 13)]
    ones = []
    for number in range(count):
        prompt = [*rng.choice(systems), *(rng.randrange(3) for _ in range(rng.randrange(1, 14)))]
        one = request(
            f"s{number}", prompt, rng.choice("mmn"), max_tokens=rng.randrange(1, 40), priority=rng.randrange(2)
        )
        ones.append(replace(one, tenant=rng.choice(("", "", "t"))))
    return ones


def _config(rng: random.Random, devices: int, predicted: bool) -> ClusterConfig:
    on = [rng.random() < 0.5 for _ in range(3)]
    control = ControlConfig(
        scaling=on[0],
        rearranging=on[1],
        proactive=on[2],
        rebalance=rng.choice(("strict", "owner", "least-busy", "recompute")),
        high=rng.choice((0.5, 0.8)),
        low=0.3,
        idle_ms=40,
        cooldown_ms=20,
        rearrange_interval_ms=40,
        interval_ms=5,
        migration_timeout_ms=rng.choice((20, 400)),
        rebalance_margin=1,
        max_migrations=rng.choice((1, 4)),
        bandwidth=1e6,
        crossing_us=1e5,
    )
    return ClusterConfig(
        devices=devices,
        placement=rng.choice(("partition",) if predicted else ("partition", "replicate", "on-demand", "auto")),
        prefill_chunk=rng.choice((4, 256)), control=control,
        prefix_caching=rng.choice(("off",) if predicted else ("off", "active", "cached")),
        owner_margin=rng.choice((0.0, 8.0)),
        watermark=rng.choice((0.0, 0.05)),
        speculation=SpeculationConfig("exact" if predicted else rng.choice(("off", "exact")), top=0.5),
        migration_final_sets=rng.choice((1, 2)),
        max_crashes=9,  # more than the deaths of a schedule: none of them ends a sequence
    )  # fmt: skip


def _with_roles(config: ClusterConfig, rng: random.Random) -> ClusterConfig:
    names: list[RoleName] = ["prefill", "decode"]
    names += [rng.choice(("prefill", "decode", "both")) for _ in range(config.devices - 2)]
    rng.shuffle(names)
    roles = tuple((f"d{at}", name) for at, name in enumerate(names))
    meanwhile: UntilHandoff = random.Random(repr((names, config.prefill_chunk))).choice(("rest", "decode"))
    grain = rng.choice(("request", "chunk"))
    if random.Random(repr((config.prefill_chunk, names))).random() < 0.4 or os.environ.get("BLOCKZOO_GRAIN") == "layer":
        grain = "layer"
    decode = DecodeConfig(grain=grain, until_handoff=meanwhile, local_prefill=rng.choice((0, 4, 30)))
    return replace(config, roles=roles, dispatch="placed", speculation=SpeculationConfig(), decode=decode)


def _with_loans(config: ClusterConfig, rng: random.Random, mode: LendingMode, predicts: bool) -> ClusterConfig:
    lending = LendingConfig(
        mode, rng.choice((0.3, 0.9, 1.0)), rng.choice((0.02, 1.0)), recall=rng.choice((0.0, 0.25, 1.0)),
        reclaim=rng.random() < 0.5, circle_pages=rng.choice((0, 2)), beat_ms=10, gone_ms=100,
        managers=rng.choice((1, 3)), mend=True,
    )  # fmt: skip
    shape: LoanShape = random.Random(repr(lending)).choice(("tokens", "layers", "cheapest"))
    named = [each for each in get_args(LoanShape) if each == os.environ.get("BLOCKZOO_SHAPE")]
    cut = random.Random(repr(lending) + "cut").choice((1, 8, 64))
    lending = replace(lending, shape=named[0] if named else shape, layer_mib=0.0001, cut_tokens=cut)
    placement = rng.choice((config.placement, "replicate"))
    if predicts:
        return replace(config, dispatch="placed", lending=lending)
    return replace(config, dispatch="placed", speculation=SpeculationConfig(), lending=lending, placement=placement)


def _serve(model: IntegerModel) -> ServeModel:
    return serve(model, "m", *CUT)
