"""One small frozen dataclass per component; unknown keys are refused by the constructors. Defaults serve a laptop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """Tensors from device to device, past the host's memory.

    `network`: also between machines, which trusts the network; otherwise only between agents of one machine.
    `receive_timeout_s`: the longest wait for a tensor that is due. `send_timeout_s`: the longest wait until a sent
    tensor is taken by an agent that may be in a long step. `connect_timeout_s`: the longest wait for a link.
    `max_inflight_bytes`: per link.
    """

    network: bool = False
    receive_timeout_s: float = 10.0
    send_timeout_s: float = 300.0
    connect_timeout_s: float = 20.0
    max_inflight_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if min(self.receive_timeout_s, self.send_timeout_s, self.connect_timeout_s) <= 0 or self.max_inflight_bytes < 1:
            raise ValueError("the limits of direct links must be positive")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One device of a cluster.

    `max_num_batched_tokens`, `max_num_seqs`: limits of one step. `page_timeout_ms`: a row that waits longer for
    pages is lost.

    A migration recomputes `recompute_chunk` tokens at a time from the front and fetches `fetch_window` page groups
    at a time from the back, with `max_inflight_fetches` fetches at once.
    `return_slack`: a slot is kept for a sequence's next row this share longer than its round trips usually take
    (BL-22).
    `batch_wait_us`: the longest time that a step waits for rows due back from the scheduler; 0: it never waits.
    `activation_cache_bytes`: hidden states that came into the device's stages, kept in host memory while their
    sequences are there, so that blocks in the middle of a chain can be recomputed where they move to; the oldest go
    first; 0: none are kept.
    `chunk_prefill`: a prompt's chunk takes what decodes leave of a step where the whole chain is here; otherwise it
    runs whole or waits.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    page_timeout_ms: int = 2000
    recompute_chunk: int = 64
    fetch_window: int = 4
    max_inflight_fetches: int = 2
    return_slack: float = 0.5
    batch_wait_us: int = 2000
    activation_cache_bytes: int = 0
    chunk_prefill: bool = False

    def __post_init__(self) -> None:
        if self.activation_cache_bytes < 0:
            raise ValueError("activation_cache_bytes is at least 0")
        limits = (
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.page_timeout_ms,
            self.recompute_chunk,
            self.fetch_window,
        )
        if min(*limits, self.max_inflight_fetches) < 1 or self.return_slack < 0:
            raise ValueError(
                "max_num_batched_tokens, max_num_seqs and the other limits of an agent must be at least 1, "
                "return_slack at least 0"
            )
        if not 0 <= self.batch_wait_us <= 1_000_000:
            raise ValueError("batch_wait_us is from 0 to 1,000,000")


#: How blocks are first placed on devices:
#: `replicate`: all chains on as few devices as hold them, and as many copies of that as fit;
#: `partition`: one copy, cut over all devices;
#: `on-demand`: one copy of each chain, whole where a device takes it; further copies as load asks for them;
#: `eager`: the same, but devices that would stay empty get further copies at once;
#: `frag-min`: one copy of each block, each by itself where least memory is left over (a paper's baseline);
#: `auto`: `replicate` on few devices, `on-demand` on many.
Placement = Literal["auto", "replicate", "partition", "on-demand", "eager", "frag-min"]

#: How a new sequence's path, and places for further copies, are chosen where blocks were not profiled: the path on
#: which all steps then read the fewest bytes (`least-bytes`, `policy.routing.bytes_read`), or the devices with the
#: fewest sequences (`least-loaded`).
Routing = Literal["least-bytes", "least-loaded"]

#: Where a running sequence's next tokens run, when its device is busier than another with the same blocks (BL-19,
#: Figure 24): it stays with its K and V whatever the others do (`strict`); it goes, K and V copied and recomputed from
#: both ends, where that gains more than it costs (`owner`); it goes to the least busy one and its K and V are copied
#: (`least-busy`), or computed there again (`recompute`).
Rebalancing = Literal["strict", "owner", "least-busy", "recompute"]


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """What a cluster's scheduler does by the clock. Each mechanism is a switch: off, or with its paper's baseline
    beside it.

    `scaling`: block instances come and go by load (BL-24): above `high` of what a device's memory takes, after
    `idle_ms` without work.
    `rearranging`: instances move next to those with which they exchange rows (BL-26), every
    `rearrange_interval_ms`. `locality` false: new instances go where least memory is left over instead (frag-min).
    `proactive`: K and V of paused sequences move ahead of their return (BL-17).
    `rebalance`: see there. `rebalance_margin`: a device gives sequences away when it has so many more than another.

    `interval_ms`: between two looks at loads. `cooldown_ms`: a scaled block is left alone for so long.
    `migration_timeout_ms`: a sequence that could not be moved by then stays. `max_migrations`: at once.
    `bandwidth`: bytes per second at which K, V and weights are taken to
    move. `crossing_us`: what a row loses between two servers.
    """

    scaling: bool = True
    rearranging: bool = True
    locality: bool = True
    proactive: bool = True
    rebalance: Rebalancing = "strict"
    high: float = 0.8
    low: float = 0.4
    idle_ms: int = 300_000
    cooldown_ms: int = 60_000
    rearrange_interval_ms: int = 60_000
    interval_ms: int = 1_000
    migration_timeout_ms: int = 30_000
    rebalance_margin: int = 4
    max_migrations: int = 16
    bandwidth: float = 1e9
    crossing_us: float = 200.0

    def __post_init__(self) -> None:
        times = (
            self.idle_ms,
            self.cooldown_ms,
            self.rearrange_interval_ms,
            self.interval_ms,
            self.migration_timeout_ms,
        )
        if min(*times, self.max_migrations, self.rebalance_margin) < 1 or self.bandwidth <= 0 or self.crossing_us < 0:
            raise ValueError("the periods of a cluster's control must be at least 1, its bandwidth more than 0")
        if not 0.0 <= self.low < self.high or self.rebalance not in get_args(Rebalancing):
            raise ValueError(f"control needs 0 <= low < high, and rebalance one of {', '.join(get_args(Rebalancing))}")

    @classmethod
    def off(cls) -> ControlConfig:
        """Nothing happens by the clock."""
        return cls(scaling=False, rearranging=False, proactive=False)


#: Predicted hops (BL-25): none; such that every token is the chain's own; or, for requests that allow other blocks,
#: such that predictions stand which are alike enough.
SpeculationMode = Literal["off", "exact", "similarity"]
LaneChoice = Literal["own", "shared"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """`top`: the share of block instances that are predicted, by the time that their queues take. `threshold`: the
    cosine at which a prediction stands, where that is allowed. `lane`: stand-ins run on a thread or stream of their
    own, or before the others on one.
    `window`: predictions of an instance by which it is judged whether they gain anything; 0: they never end. `rest`:
    reviews (ticks) after which one that has ended may be tried again.
    """

    mode: SpeculationMode = "off"
    top: float = 0.1
    threshold: float = 0.95
    lane: LaneChoice = "own"
    window: int = 32
    rest: int = 60

    def __post_init__(self) -> None:
        if self.lane not in get_args(LaneChoice):
            raise ValueError(f"stand-ins' lane is own or shared, not {self.lane!r}")
        if self.window < 0 or self.rest < 1:
            raise ValueError("a window is a number of predictions, or 0; a rest is at least one review")
        if (
            self.mode not in get_args(SpeculationMode)
            or not 0.0 <= self.top <= 1.0
            or not -1.0 <= self.threshold <= 1.0
        ):
            raise ValueError("speculation is off, exact or similarity; top in [0, 1], threshold in [-1, 1]")

    @property
    def own_lane(self) -> bool:
        """Whether agents need a lane for stand-ins."""
        return self.mode != "off" and self.lane == "own"


#: Sharing pages of equal prompt prefixes: not at all, with sequences that run (`active`), or also with ended ones,
#: whose pages stay until the memory is needed (`cached`).
PrefixCaching = Literal["off", "active", "cached"]


#: Who says where a sequence's hops run (BL-23): the scheduler all of them, by its record of who holds what (`placed`);
#: or the scheduler the first, and agents those behind it, each offered to `broadcast_fanout` devices that could run it,
#: the first answer takes it (`broadcast`).
Dispatching = Literal["placed", "broadcast"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The scheduler of a cluster.

    `devices`: how many must be there before blocks are placed. `placement`, `routing`, `prefix_caching`,
    `dispatch`: see there.
    `max_num_seqs`: sequences on a device at once. `prefill_chunk`: tokens of a prompt that travel together.
    `watermark`: share of a device's pages that new sequences leave free. `stride`: the decode credit, tokens
    that a sequence may decode before its device reports them, where its path is one device.
    `hop_cost`: what a change of device weighs when paths are chosen: in sequences, or in hundredths of the bytes
    that a chain reads.

    `owner_margin`: a new sequence goes where its prefix is cached if that path is at most so many sequences dearer
    than the cheapest, for a prompt that is cached whole, and in proportion for less (BL-19; infinite: wherever
    there is room).
    `migration_final_sets`: a migration finishes when at most so many page groups are left, and fails after
    `migration_max_stages` stages.
    `max_batch_per_block`: rows of a step that may pass one block instance, with slots kept for sequences that are
    expected back (BL-14, BL-22); 0: as many as a step takes.
    `max_crashes`: devices that may die in a row with a sequence's row before its next token; then the sequence
    ends. From the second on it runs beside no other such sequence, so that it is known which one kills devices.
    `row_timeout_s`: how long all devices of a sequence's path may report that they are idle while a row of it is
    under way; then the row runs again (`scheduler.decode.stall_detector`), and the sequence ends after as many in a
    row. 0: no limit.
    `broadcast_fanout`: devices that a hop is offered to. `control`: what happens by the clock. `speculation`: hops
    that are predicted.
    """

    devices: int = 1
    placement: Placement = "auto"
    max_num_seqs: int = 256
    prefill_chunk: int = 256
    watermark: float = 0.01
    stride: int = 1
    hop_cost: float = 4.0
    routing: Routing = "least-loaded"
    migration_final_sets: int = 2
    migration_max_stages: int = 8
    control: ControlConfig = field(default_factory=ControlConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    prefix_caching: PrefixCaching = "active"
    owner_margin: float = 8.0
    max_batch_per_block: int = 0
    max_crashes: int = 4
    row_timeout_s: float = 30.0
    dispatch: Dispatching = "placed"
    broadcast_fanout: int = 3

    def __post_init__(self) -> None:
        if self.routing not in get_args(Routing):
            raise ValueError(f"routing must be one of {', '.join(get_args(Routing))}")
        if self.dispatch not in get_args(Dispatching) or self.broadcast_fanout < 2:
            raise ValueError("dispatch is placed or broadcast, and a hop is offered to at least 2 devices")
        if (
            self.prefix_caching not in get_args(PrefixCaching)
            or not self.owner_margin >= 0
            or self.max_batch_per_block < 0
        ):
            raise ValueError(
                "prefix_caching must be off, active or cached, owner_margin and max_batch_per_block at least 0"
            )
        if not 0 <= self.row_timeout_s < float("inf"):
            raise ValueError("row_timeout_s is a number of seconds, 0 for no limit")
        whole = (
            self.devices,
            self.max_num_seqs,
            self.prefill_chunk,
            self.stride,
            self.migration_final_sets,
            self.migration_max_stages,
        )
        if min(*whole, self.max_crashes) < 1 or not 0.0 <= self.watermark < 1.0 or self.hop_cost < 0:
            raise ValueError("a cluster's numbers must be at least 1, its watermark in [0, 1)")
        if self.placement not in get_args(Placement):
            raise ValueError(f"placement must be one of {', '.join(get_args(Placement))}")


#: How the dense executor fills its slots: the four that the paper compares (Baton, section 5.1).
#: `run-to-completion`: a batch takes no one in until all of it are done;
#: `pd`: the same, but prompts run apart, in batches of similar length;
#: `baton`: whoever comes takes a free slot at once, and the others' inputs are padded to its prompt (vector shaping);
#: `baton-pd`: prompts run apart, and their K and V are put in the free slot (vector embedding).
DenseMode = Literal["run-to-completion", "pd", "baton", "baton-pd"]

DensePadding = Literal["computed", "skipped"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """The dense executor. `slots`: rows of a model's batch at most. Above `high` of the pool rows are moved out, up to
    `low` of it they are taken in (BA-15). `padding`: windows are rectangles; what rows that run have in them beside
    tokens is `computed`, as in the paper, or `skipped`, wherever a model's layers do not attend by themselves. Neither
    changes an answer, or who runs when.
    """

    mode: DenseMode = "baton-pd"
    slots: int = 16
    high: float = 0.90
    low: float = 0.75
    padding: DensePadding = "skipped"

    def __post_init__(self) -> None:
        if self.slots < 1 or not 0.0 < self.low <= self.high <= 1.0:
            raise ValueError("slots must be at least 1, and 0 < low <= high <= 1")
        if self.mode not in get_args(DenseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(DenseMode))}")
        if self.padding not in get_args(DensePadding):
            raise ValueError(f"padding must be one of {', '.join(get_args(DensePadding))}")


#: How a CPU holds the weights of linear layers: as stored and mapped (`plain`), in the layout that it multiplies
#: fastest (`packed`), or whichever is measured to be faster here (`auto`). One copy of each in any case.
Weights = Literal["auto", "plain", "packed"]


#: What a CPU computes with: torch's own operations (`stock`), kernels of ours that are compiled on first use
#: (`native`), or these where a compiler is there (`auto`).
KernelChoice = Literal["auto", "stock", "native"]


#: Whether decode steps are recorded once per shape and replayed without running their modules: where that is a CUDA
#: graph (`auto`), never, or anywhere (`on`; a CPU runs the modules again, which is good for tests of all the rest).
GraphChoice = Literal["auto", "off", "on"]


#: Whether the next step is planned and launched before the tokens of the one under way are known: on GPUs (`auto`),
#: never, or anywhere. On a CPU steps then run on a thread of their own, which was not measured to be faster.
AheadChoice = Literal["auto", "off", "on"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One device's engine.

    `kv_cache_memory_bytes`: size of the page pool, shared by all models. `page_tokens`: tokens per page for the
    model with the largest KV per token; narrower models get more tokens into the same bytes. `dtype`: None keeps
    each model's own.
    `max_model_len`: caps every model's context. `layers`: transformers' own (`stock`), or fewer and
    larger operations where a family has them (`fused`). `weights`, `kernels`, `graphs`, `async_scheduling`: see
    there.
    `trace_segments`: report each segment run (for the trace), which keeps steps from being recorded.
    `dense`: what the dense executor does beyond; the paged one does not read it.
    """

    device: str = "cpu"
    kv_cache_memory_bytes: int = 1 << 30
    page_tokens: int = 16
    dtype: str | None = None
    max_model_len: int | None = None
    layers: Literal["fused", "stock"] = "fused"
    weights: Weights = "auto"
    kernels: KernelChoice = "auto"
    graphs: GraphChoice = "auto"
    async_scheduling: AheadChoice = "auto"
    trace_segments: bool = False
    dense: DenseConfig = field(default_factory=DenseConfig)

    def __post_init__(self) -> None:
        if (
            self.kv_cache_memory_bytes < 1
            or self.page_tokens < 1
            or (self.max_model_len is not None and self.max_model_len < 1)
        ):
            raise ValueError("kv_cache_memory_bytes, page_tokens and max_model_len must be positive")
        if self.layers not in ("fused", "stock"):
            raise ValueError("layers must be fused or stock")
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights must be one of {', '.join(get_args(Weights))}")
        if self.kernels not in get_args(KernelChoice):
            raise ValueError(f"kernels must be one of {', '.join(get_args(KernelChoice))}")
        if self.graphs not in get_args(GraphChoice):
            raise ValueError(f"graphs must be one of {', '.join(get_args(GraphChoice))}")
        if self.async_scheduling not in get_args(AheadChoice):
            raise ValueError(f"async_scheduling must be one of {', '.join(get_args(AheadChoice))}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP surface. `max_body_bytes`, `max_choices` and `max_queued` bound what one client can cost. `early_exit`:
    requests may have their model left behind some of its layers (BL-30)."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    max_choices: int = 64
    max_queued: int = 4096
    drain_seconds: float = 30.0
    trace: str | None = None
    early_exit: bool = False
