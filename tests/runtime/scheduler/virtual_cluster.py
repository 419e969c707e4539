"""Scheduler, agents and counting engines under one virtual clock, with a heap instead of processes and sockets.

The same inputs give the same events. Messages take `latency` ns and arrive in order between two ends. A device that
is killed loses all its state and all messages on their way to it.

After every event what acted in it is checked: the scheduler or an agent, its pages, and that each token event comes
once and in order.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from blake3 import blake3

from runtime.agent.agent import Agent
from runtime.agent.steps.queue import Lane
from runtime.chains import Array, Block, Chain, Likeness, StageEngine, Surrogate, devices_of
from runtime.config import AgentConfig, ClusterConfig
from runtime.control.agent_io import (
    ActivationsVerified,
    CopyIn,
    CopyOut,
    DropLoan,
    DropStage,
    HoldLoan,
    LoadStage,
    PagesWritten,
    ReadPages,
    ReturnPages,
    Send,
    SendActivations,
    ShareHostMemory,
    StageFailed,
    StageLoaded,
    StageStep,
    VerifyActivations,
    WritePages,
)
from runtime.control.scheduler_io import AbortSequence, AddRequest, AgentDown, EmitTokens, ReplaceAgent, Tick
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel, expected
from runtime.loans import LoanEngine
from runtime.messages import PROTOCOL, SCHEDULER, AgentHello, PageData
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.scheduler.scheduler import Scheduler
from runtime.transport.checksums import joined_rows
from runtime.types import SequenceRequest, StepPlan, TokenEvent
from tests.runtime.scheduler import virtual_copies as copies
from tests.runtime.scheduler import virtual_layers as layers
from tests.runtime.scheduler import virtual_loans as loans
from tests.runtime.scheduler.virtual_checks import Checks
from tests.runtime.scheduler.virtual_copies import Node
from tests.runtime.virtual import ListTrace, Told

MS = 1_000_000


@dataclass
class VirtualCluster:
    """A scheduler and its devices under one virtual clock; times are in ns.

    Fields:
        models, cuts: Counting models to serve, and where each one's chain is cut.
        chains, blocks: Further chains and blocks, for engines of `make_engine`.
        make_engine: Makes the engine of a device by its name; None for counting engines.
        devices: Number of devices, named d0, d1 and so on.
        pages: KV pages of a device.
        latency: Time of a message between two ends.
        page_bytes_per_ms: Speed of a link for pages and kept hidden states.
        restart: Time until a dead device is replaced.
        limits: Bytes of weights that each device may hold; empty for no limit.
        budget: Bytes of weights and pages together of each device; 0: weights take no pages.
        replace: Whether dead devices are replaced.
        alpha, beta: Time of a counting engine's step, and of each token in it.
        surrogates, stand_ins: Stand-ins by model, as the scheduler and as counting engines need them (BL-25).
        lanes: Lanes of each device's steps.
        costs: Returns the time of a step; None for the engine's own.
        alike: Compares hidden states of a stand-in with the real ones; None for the engine's own.
        damage: Selects pages and hidden states whose digest is wrong.
        servers: The server of each device.
    """

    models: Sequence[IntegerModel] = ()
    cuts: Sequence[Sequence[int]] = ()
    chains: Sequence[Chain] = ()
    blocks: Sequence[Block] = ()
    make_engine: Callable[[str], StageEngine] | None = None
    devices: int = 2
    pages: int = 256
    config: ClusterConfig | None = None
    agent_config: AgentConfig = field(default_factory=lambda: AgentConfig(recompute_chunk=8, fetch_window=1))
    latency: int = MS // 10
    page_bytes_per_ms: float = 1e9
    restart: int = 50 * MS
    limits: Sequence[int] = ()
    budget: int = 0
    replace: bool = True
    alpha: int = MS
    beta: int = 10_000
    surrogates: Mapping[str, Sequence[Surrogate]] = field(default_factory=dict)
    stand_ins: Sequence[IntegerModel] = ()
    lanes: tuple[Lane, ...] = ("all",)
    costs: Callable[[StepPlan], int] | None = None
    alike: Callable[[Array, Array], Likeness] | None = None
    adaptation: VariantChoice | None = None
    damage: Callable[[PageData], bool] = lambda pages: False
    servers: Sequence[str] = ()
    #: Returns the time (ns) that pages take to host memory or back.
    copying: Callable[[], int] = lambda: 0
    #: Selects page tables of which the copy fails.
    spoil: Callable[[str], bool] = lambda key: False
    #: Whether agents prepare their next steps while idle, and send first the rows that other devices wait for, as their
    #: loops do.
    prepares: bool = True
    #: Returns the time (ns) that a stage takes to load.
    loading: Callable[[], int] = lambda: MS
    #: Returns the time (ns) that a message takes in addition to `latency`.
    delay: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        cuts = self.cuts or [()] * len(self.models)
        chains = [*self.chains, *(model.chain(*cut) for model, cut in zip(self.models, cuts, strict=True))]
        blocks = {block.id: block for block in self.blocks}
        blocks |= {
            block.id: block for model, cut in zip(self.models, cuts, strict=True) for block in model.blocks(*cut)
        }
        self.trace = ListTrace()
        config = self.config or ClusterConfig(devices=self.devices, placement="partition")
        self.scheduler = Scheduler(chains, blocks.values(), config, self.trace, self.surrogates, self.adaptation)
        self.now = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._last: dict[tuple[str, str], int] = {}
        self._free: dict[tuple[str, str], int] = {}
        self.nodes: dict[str, Node] = {}
        self.told: dict[str, Told] = {}
        self.requests: dict[str, SequenceRequest] = {}
        self.hidden_bytes = self.fed_bytes = 0
        self.sent: list[tuple[int, str, str, Any]] = []
        self._checks = Checks()
        for number in range(self.devices):
            self.at(0, lambda name=f"d{number}": self.bring_up(name))

    # -- actions of a test ---------------------------------------------------------------------------------------------

    def ask(self, *requests: SequenceRequest, at: int = 0) -> None:
        """Send requests to the scheduler at a time (ns), and record their token events."""
        for request in requests:
            self.requests[request.seq] = request
            self.told[request.seq] = Told(list(request.output))
            self.at(at, lambda request=request: self.tell(AddRequest(request)))

    def abort(self, seq: str, at: int) -> None:
        self.at(at, lambda: self.tell(AbortSequence(seq)))

    def ticks(self, every: int, until: int) -> None:
        """Send the scheduler a `Tick` every so many ns until a time."""
        for when in range(every, until, every):
            self.at(when, lambda: self.tell(Tick()))

    def at(self, when: int, act: Callable[[], None]) -> None:
        """Schedule a call, at once if the time is over."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, act))

    def run(self, until: int | None = None, most: int = 200_000) -> None:
        """Run events until none is left, or until that time (ns)."""
        for _ in range(most):
            if not self._heap or (until is not None and self._heap[0][0] > until):
                return
            self.now, _, act = heapq.heappop(self._heap)
            act()
            self.check()
        raise AssertionError(f"still busy after {most} events")

    def run_one(self) -> None:
        """Run one event."""
        self.now, _, act = heapq.heappop(self._heap)
        act()
        self.check()

    def expect(self) -> None:
        """Assert that every sequence has exactly its own model's tokens, and that nothing is left on any device."""
        models = {model.spec.name: model for model in self.models}
        for seq, request in self.requests.items():
            told = self.told[seq]
            assert told.events and told.last.finish in ("stop", "length"), (seq, told.events[-1:])
            assert told.tokens == expected(models[request.model], request.prompt, request.sampling), seq
        self.expect_empty()

    def expect_empty(self) -> None:
        """Assert that no sequence is alive, and that only cached prefixes hold pages."""
        assert not self.scheduler.busy, "sequences are alive"
        if len(self.scheduler.prefix_cache):
            copies.expect_cached_prefixes(self)
        for node in self.living():
            counts = node.agent.pages()
            assert counts.free == counts.capacity, (node.name, counts)
            assert not node.agent._kept.nbytes, (node.name, node.agent._kept.nbytes)
            copies.expect_none(node)
        assert all(device.pages.used == device.host_used == 0 for device in self.scheduler.devices)

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def kill(self, name: str) -> None:
        """Kill a device now; the scheduler is notified one `latency` later and restarts it."""
        node = self.nodes.get(name)
        if node is not None and node.alive:
            node.alive = False
            self.at(self.now + self.latency, lambda: self.tell(AgentDown(name, "killed")))

    def migrate(self, seq: str, blocks: range, target: str, **how: bool) -> str | None:
        """Move blocks of a sequence; return the reason if that is refused."""
        why = self.scheduler.migrations.start(self.scheduler.sequences[seq], blocks, target, self.now, **how)
        self.carry_out(self.scheduler.handle(Tick(), self.now))
        return why

    def migrate_some(self, rng: random.Random, **how: bool) -> str | None:
        """Move a random run of blocks of a random sequence to a random device."""
        running = [sequence for sequence in self.scheduler.sequences.values() if sequence.path and sequence.chain]
        if not running:
            return "nobody runs"
        sequence = rng.choice(running)
        devices = devices_of(sequence.chain, sequence.path)
        first = rng.randrange(len(devices))
        last = first + 1
        while last < len(devices) and devices[last] == devices[first] and rng.random() < 0.6:
            last += 1
        return self.migrate(sequence.seq, range(first, last), f"d{rng.randrange(self.devices)}", **how)

    # -- inside --------------------------------------------------------------------------------------------------------

    def bring_up(self, name: str) -> None:
        """Start an incarnation of a device."""
        number = int(name[1:])
        engine = self.make_engine(name) if self.make_engine else self._counting(name)
        if isinstance(engine, LoanEngine):
            engine.borrow(loans.DirectLink(self, name), self.config.lending.ship if self.config else "query")
        alike, pages = self.alike or engine.alike, engine.page_capacity
        agent = Agent(name, pages, self.agent_config, alike, page_bytes=engine.page_bytes)
        self.nodes[name] = Node(name, agent, engine)
        limit = self.limits[number] if self.limits else 0
        ready = AgentHello(
            name, PROTOCOL, "test", engine.page_capacity, engine.page_bytes, limit, name,
            self.servers[number] if self.servers else "",
            activation_cache_bytes=self.agent_config.activation_cache_bytes, budget=self.budget,
            fetch_sets=self.nodes[name].agent.fetch_sets, recompute_chunk=self.agent_config.recompute_chunk,
            host_memory=self.agent_config.host_memory_bytes,
        )  # fmt: skip
        self.at(self.now + self.latency, lambda: self.tell(ready))

    def _counting(self, name: str) -> IntegerEngine:
        models = [*self.models, *self.stand_ins]
        return IntegerEngine(
            models, self.pages, device=name, alpha=self.alpha, beta=self.beta, rewrites=bool(self.stand_ins)
        )

    def tell(self, event: Any) -> None:
        """Let the scheduler handle an event now, and carry out its commands."""
        self.carry_out(self.scheduler.handle(event, self.now))

    def carry_out(self, commands: Iterable[Any]) -> None:
        self._checks.acted.add(SCHEDULER)
        for command in commands:
            match command:
                case Send(to, message, arrays):
                    self.post("scheduler", to, message, arrays)
                case EmitTokens(events):
                    self.hear(events)
                case ReplaceAgent(device):
                    if self.replace:
                        self.at(self.now + self.restart, lambda device=device: self.bring_up(device))

    def hear(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            self.told[event.seq].take(event)

    def post(self, sender: str, to: str, message: Any, arrays: Sequence[Array], extra: int = 0) -> None:
        """Deliver a message later, after all earlier ones from this sender to this receiver.

        `extra` is the time (ns) that its arrays take on the link.
        """
        free = max(self.now, self._free.get((sender, to), 0)) + extra  # a link carries one transfer at a time
        if extra:
            self._free[sender, to] = free
        due = max((free if extra else self.now) + self.latency + self.delay(), self._last.get((sender, to), 0))
        self._last[sender, to] = due
        self.sent.append((self.now, sender, to, message))
        node = self.nodes.get(to)
        if to == SCHEDULER:
            source = self.nodes[sender]
            self.at(due, lambda: self.tell(message) if source.alive else None)
        elif node is not None:
            node.coming += 1
            self.at(due, lambda: self.arrive(node, message, arrays))

    def arrive(self, node: Node, message: Any, arrays: Sequence[Array]) -> None:
        node.coming -= 1
        self.deliver(node, message, arrays)

    def deliver(self, node: Node, message: Any, arrays: Sequence[Array]) -> None:
        if node.alive:
            self.obey(node, node.agent.handle(message, arrays, self.now))

    def obey(self, node: Node, commands: Iterable[Any]) -> None:
        """Carry out an agent's commands, and start its next steps."""
        self._checks.acted.add(node.name)
        for command in commands:
            match command:
                case Send(to, message, arrays):
                    self.post(node.name, to, message, arrays)
                case LoadStage(stage):
                    try:
                        spec = node.engine.load(stage)
                        event: Any = StageLoaded(stage, spec, node.engine.memory().weights)
                    except Exception as error:
                        event = StageFailed(stage, str(error))
                    self.at(self.now + self.loading(), lambda event=event: self.deliver(node, event, ()))
                case HoldLoan() | DropLoan():
                    loans.carry_out(node, command)
                case DropStage(stage):
                    node.engine.unload(stage)
                case ReturnPages(pages):
                    node.engine.return_pages(pages)
                case ReadPages(pages, to, message):
                    layers.check_read(node, pages, message)
                    array = node.engine.read_pages(pages)
                    digest = "0" * 64 if self.damage(message) else blake3(bytes(array.data)).hexdigest()
                    answer = msgspec.structs.replace(message, digest=digest)
                    nbytes = len(pages) * node.engine.page_bytes
                    self.post(node.name, to, answer, (array,), int(nbytes / self.page_bytes_per_ms * MS))
                case SendActivations(pieces, to, message):
                    array = joined_rows(pieces)
                    digest = "0" * 64 if self.damage(message) else blake3(array.data).hexdigest()
                    self.fed_bytes += len(array.data)
                    answer = msgspec.structs.replace(message, digest=digest)
                    self.post(node.name, to, answer, (array,), int(len(array.data) / self.page_bytes_per_ms * MS))
                case VerifyActivations(data, digest, move, lo, hi):
                    error = "" if blake3(bytes(data.data)).hexdigest() == digest else "the hidden states do not verify"
                    self.obey(node, node.agent.handle(ActivationsVerified(move, lo, hi, error), (), self.now))
                case WritePages(pages, data, digest, move, lo, hi, some):
                    error = "" if blake3(bytes(data.data)).hexdigest() == digest else "the pages do not verify"
                    if not error:
                        node.engine.write_pages(pages, data)
                    self.obey(node, node.agent.handle(PagesWritten(move, lo, hi, some, error), (), self.now))
                case CopyOut() | CopyIn() | ShareHostMemory():
                    copies.carry_out(self, node, command)
        self.start(node)

    def start(self, node: Node) -> None:
        """Start a step on each free lane of a device that has one to run."""
        self._checks.acted.add(node.name)
        for lane in self.lanes if node.alive else ():
            if lane not in node.running and (step := node.agent.next_step(self.now, lane)) is not None:
                self._run(node, step, lane)
        if self.prepares and node.alive and not node.running:
            node.agent.prepare()
        if node.alive and node.agent.lingers is not None:
            self.at(max(self.now, node.agent.lingers), lambda: self.start(node))

    def _run(self, node: Node, step: StageStep, lane: Lane) -> None:
        node.running.add(lane)
        result = loans.run(self, node, step, lane)
        if result is None:
            return
        self.hidden_bytes += sum(len(array.data) for array in result.outputs.values())
        busy = result.result.busy if self.make_engine is None else self.alpha
        if self.costs is not None:
            busy = self.costs(step.plan)
        if lane == "all" and self.scheduler._state.config.decode.grain == "layer":
            layers.watch(self, node, step.plan, busy)
        self.at(self.now + busy, lambda: self.finish(node, result, lane))

    def finish(self, node: Node, result: Any, lane: Lane) -> None:
        if node.alive:
            node.running.discard(lane)
            layers.end(node)
            first = node.agent.first(result, self.now) if self.prepares and lane == "all" else None
            if first is not None:
                self.post(node.name, first.to, first.message, first.arrays)
            self.obey(node, node.agent.finish_step(result, self.now, lane))

    def check(self) -> None:
        """Check what has acted since the last check: `virtual_checks`."""
        self._checks.run(self)
