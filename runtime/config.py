"""One small frozen dataclass per component; unknown keys are refused by the constructors. Defaults serve a laptop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """Limits of one step. `token_budget`: tokens per step, decodes first, the rest for prompt chunks (TI-08)."""

    token_budget: int = 512
    max_sequences: int = 256
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_sequences < 1 or not 0.0 <= self.watermark < 1.0:
            raise ValueError("token_budget and max_sequences must be at least 1, watermark in [0, 1)")


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """Tensors from device to device, past the host's memory. `network`: between machines, too, which trusts what lies
    between them; else only between agents of one machine. `seconds`: that a tensor may take that is waited for;
    `patience`: until one that was sent is taken, by an agent that may be at a long step; `making`: until a link stands.
    `backlog`: bytes under way on one link, at most.
    """

    network: bool = False
    seconds: float = 10.0
    patience: float = 300.0
    making: float = 20.0
    backlog: int = 256 << 20

    def __post_init__(self) -> None:
        if min(self.seconds, self.patience, self.making) <= 0 or self.backlog < 1:
            raise ValueError("the limits of direct links must be positive")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One device of a cluster. `token_budget`, `max_rows`: of one step. `patience_ms`: of a row
    that waits for pages, until it is lost.

    A migration recomputes `chunk` tokens at a time from the front and fetches `window` page groups at a time from the
    back, `fetches` of them under way at once. `slack`: how much longer than a round trip usually takes a slot is kept
    for a sequence that went on (BL-22), as a share of it. `linger_us`: for so long at most a step waits for rows that
    are due back from the scheduler; 0: for none.
    `boundary_bytes`: of hidden states that came into its stages, kept in the host's memory for as long as their
    sequences are there, so that blocks in the middle of a chain can be recomputed where they move to; the oldest go
    first; 0: none are kept.
    `divide`: prompts take what decodes leave of a step, token by token, where all of their chain is here; else a chunk
    runs whole or waits.
    """

    token_budget: int = 512
    max_rows: int = 256
    patience_ms: int = 2000
    chunk: int = 64
    window: int = 4
    fetches: int = 2
    slack: float = 0.5
    linger_us: int = 2000
    boundary_bytes: int = 0
    divide: bool = False

    def __post_init__(self) -> None:
        if self.boundary_bytes < 0:
            raise ValueError("boundary_bytes is at least 0")
        if (
            min(self.token_budget, self.max_rows, self.patience_ms, self.chunk, self.window, self.fetches) < 1
            or self.slack < 0
        ):
            raise ValueError("the settings of a relay must be at least 1")
        if not 0 <= self.linger_us <= 1_000_000:
            raise ValueError("a step lingers for 0 to 1,000,000 us")


#: How blocks are first put on devices: everything on as few devices as hold it, as often as there is room (`copies`);
#: cut over all of them (`split`); one copy of each chain, whole where a device takes it, and further ones as they are
#: asked for (`demand`), or at once where devices would hold nothing (`ample`); one copy of each block, each by itself
#: where least is left over (`frag-min`, a baseline); or the first of these on few devices and `demand` on many
#: (`auto`).
Placing = Literal["auto", "copies", "split", "demand", "ample", "frag-min"]

#: By what newcomers' paths are chosen, and copies made, where blocks were not profiled: by what steps read then
#: (`reads`, `policy.routing.bytes_read`), or by how many sequences are on each device (`loads`).
Paths = Literal["reads", "loads"]

#: Where a running sequence's next tokens run, when its device is busier than another with the same blocks (BL-19,
#: Figure 24): it stays with its K and V whatever the others do (`strict`); it goes, K and V copied and recomputed from
#: both ends, where that gains more than it costs (`owner`); it goes to the least busy one and its K and V are copied
#: (`least-busy`), or computed there again (`recompute`).
Balancing = Literal["strict", "owner", "least-busy", "recompute"]


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """What the scheduler of a cluster does by the clock. Each mechanism is a switch, off or with its paper's baseline
    beside it.

    `scaling`: instances come and go by load (BL-24): above `high` of what a device's memory takes, after `idle_ms`
    without work.
    `rearranging`: instances move to whom they exchange rows with (BL-26), every `period_ms`; `locality` false: new
    instances go where least is left over instead (frag-min). `proactive`: K and V of paused sequences move ahead of
    their return (BL-17). `balancing`: see there; `margin`: sequences that a device must have more than another to give
    one away.

    `every_ms`: between two looks at loads. `calm_ms`: a block that was scaled is left alone for so long. `patience_ms`:
    after which a sequence that could not be moved stays. `moves`: sequences that are on their way at once. `bandwidth`:
    bytes per second at which K and V and weights are taken to move; `crossing_us`: what a row loses between two
    servers.
    """

    scaling: bool = True
    rearranging: bool = True
    locality: bool = True
    proactive: bool = True
    balancing: Balancing = "strict"
    high: float = 0.8
    low: float = 0.4
    idle_ms: int = 300_000
    calm_ms: int = 60_000
    period_ms: int = 60_000
    every_ms: int = 1_000
    patience_ms: int = 30_000
    margin: int = 4
    moves: int = 16
    bandwidth: float = 1e9
    crossing_us: float = 200.0

    def __post_init__(self) -> None:
        times = (self.idle_ms, self.calm_ms, self.period_ms, self.every_ms, self.patience_ms, self.moves, self.margin)
        if min(times) < 1 or self.bandwidth <= 0 or self.crossing_us < 0:
            raise ValueError("the periods of a cluster's control must be at least 1, its bandwidth more than 0")
        if not 0.0 <= self.low < self.high or self.balancing not in get_args(Balancing):
            raise ValueError(f"control needs 0 <= low < high, and balancing one of {', '.join(get_args(Balancing))}")

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


#: Whether sequences with a common beginning share its pages: never, with those that run, or also with ones that have
#: ended, which stay as long as nobody else needs their pages (`cached`).
Sharing = Literal["off", "running", "cached"]


#: Who says where a sequence's hops run (BL-23): the scheduler all of them, by its record of who holds what (`placed`);
#: or the scheduler the first, and agents those behind it, each offered to up to `offered` devices that could run it,
#: the first answer takes it (`broadcast`).
Dispatching = Literal["placed", "broadcast"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The scheduler of a cluster.

    `devices`: how many must be there before blocks are placed. `max_running`: sequences on a device at once. `chunk`:
    tokens of a prompt
    that travel together. `watermark`: share of a device's pages that newcomers leave free. `stride`: tokens that a
    sequence decodes before it comes back, on simulated devices. `paths`: see there. `hop_cost`: what a change of device
    weighs, when paths are
    chosen: against a sequence on one, or in hundredths of what a chain reads. `sharing`: see there; a newcomer goes
    where its beginning lies if that path is at most `owner_margin` sequences dearer than the cheapest one, for a prompt
    that is there whole, and in proportion for less (BL-19; infinite: wherever there is room). A migration hands over
    when at most `handover_groups` page groups are left, and gives up after `handover_stages` stages.
    `block_rows`: rows of a step that may pass one block instance, of which slots are kept for sequences that are
    expected back (BL-14, BL-22); 0: as many as a step takes. `dispatch`, `offered`: see there. `control`: what happens
    by the clock. `speculation`: hops that
    are predicted. `deaths`: devices that may die in a row with a sequence's row, before its next token; then it ends.
    From the second on it runs beside no other such sequence, so that it is known who kills devices. `row_seconds`: how
    long all devices of a sequence's path may say that they have nothing to do while a row of it is under way; then it
    runs again (`scheduler.decode.stall_detector`), and ends after as many
    in a row. 0: however long.
    """

    devices: int = 1
    placing: Placing = "auto"
    max_running: int = 256
    chunk: int = 256
    watermark: float = 0.01
    stride: int = 1
    hop_cost: float = 4.0
    paths: Paths = "loads"
    handover_groups: int = 2
    handover_stages: int = 8
    control: ControlConfig = field(default_factory=ControlConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    sharing: Sharing = "running"
    owner_margin: float = 8.0
    block_rows: int = 0
    deaths: int = 4
    row_seconds: float = 30.0
    dispatch: Dispatching = "placed"
    offered: int = 3

    def __post_init__(self) -> None:
        if self.paths not in get_args(Paths):
            raise ValueError("paths are chosen by reads or loads")
        if self.dispatch not in get_args(Dispatching) or self.offered < 2:
            raise ValueError("dispatch is placed or broadcast, and a hop is offered to at least 2 devices")
        if self.sharing not in get_args(Sharing) or not self.owner_margin >= 0 or self.block_rows < 0:
            raise ValueError("sharing must be off, running or cached, owner_margin and block_rows at least 0")
        if not 0 <= self.row_seconds < float("inf"):
            raise ValueError("row_seconds is a number of seconds, 0 for no limit")
        whole = (
            self.devices,
            self.max_running,
            self.chunk,
            self.stride,
            self.handover_groups,
            self.handover_stages,
            self.deaths,
        )
        if (
            min(whole) < 1
            or not 0.0 <= self.watermark < 1.0
            or self.hop_cost < 0
            or self.placing not in get_args(Placing)
        ):
            raise ValueError(
                "a cluster's numbers must be at least 1, its watermark in [0, 1), its placing one of "
                f"{', '.join(get_args(Placing))}"
            )


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

    `kv_bytes`: size of the page pool, shared by all models. `page_tokens`: tokens per page for the model with the
    largest KV per token; narrower models get more tokens into the same bytes. `dtype`: None keeps each model's own.
    `max_model_len`: caps every model's context. `layers`: transformers' own (`stock`), or fewer and
    larger operations where a family has them (`fused`). `weights`, `kernels`, `graphs`, `async_scheduling`: see there.
    `trace_segments`: report each segment run (for the trace), which keeps steps from being recorded.
    `dense`: what the dense executor does beyond; the paged one does not read it.
    """

    device: str = "cpu"
    kv_bytes: int = 1 << 30
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
        if self.kv_bytes < 1 or self.page_tokens < 1 or (self.max_model_len is not None and self.max_model_len < 1):
            raise ValueError("kv_bytes, page_tokens and max_model_len must be positive")
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
