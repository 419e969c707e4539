"""Define the settings of the runtime: one frozen dataclass per component, each validated when it is constructed.

The defaults suit a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from runtime.decode_config import DecodeConfig
from runtime.exclusions import without_lending, without_roles
from runtime.lending_config import LendingConfig
from runtime.order_config import OrderConfig as OrderConfig
from runtime.order_config import Overload as Overload
from runtime.order_config import Plan as Plan
from runtime.role_config import RoleChangeConfig, RoleName

#: In which order prompts run that wait on one path (TI-05 to TI-08). `off`: each sends its next rows when it can.
#: `fcfs`, `sjf`, `ljf`: in chunks that several prompts fill, by arrival, the shortest or the longest first.
PrefillOrder = Literal["off", "fcfs", "sjf", "ljf"]


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """Configure direct links: tensor transfers from device to device that bypass host memory.

    Fields:
        network: Also link agents on different machines; the network must be trusted. False: only within one machine.
        receive_timeout_s: Longest wait for a tensor that is due.
        send_timeout_s: Longest wait until the receiver, which may be in a long step, takes a sent tensor.
        connect_timeout_s: Longest wait for a link to be set up.
        max_inflight_bytes: Bytes under way, per link.
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
    """Configure the agent of one device.

    Fields:
        max_num_batched_tokens: Tokens per step.
        max_num_seqs: Rows per step.
        page_timeout_ms: A row that waits longer for pages is reported lost.
        recompute_chunk: Tokens that a migration recomputes at a time, from the front.
        fetch_window: Page sets that a migration fetches at a time, from the back.
        max_inflight_fetches: Fetches of a migration under way at once.
        return_slack: A batch slot stays reserved for a sequence's next row for its usual round-trip time plus this
            share of it (BL-22).
        batch_wait_us: Longest time that a step waits for rows that are due back from the scheduler; 0: no wait.
        activation_cache_bytes: Host memory for the hidden states that entered the device's stages, so that blocks in
            the middle of a chain can be recomputed where they migrate to. The oldest are dropped first; 0: none are
            kept.
        host_memory_bytes: Host memory for K and V of sequences that give way, shared with weights that wait (QL-10).
        chunk_prefill: Where the whole chain is on the device, a prompt's chunk takes the tokens that decodes leave of a
            step. False: a chunk runs whole or waits.
        length_probes: Ask the engine for a forecast of the answer's length with the last row of each prompt (TI-10).
        probe_steps: Steps of a device after which it is asked again for all answers that are decoded then; 0: it is
            not.
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
    host_memory_bytes: int = 0
    chunk_prefill: bool = False
    length_probes: bool = False
    probe_steps: int = 0

    def __post_init__(self) -> None:
        if min(self.activation_cache_bytes, self.host_memory_bytes, self.probe_steps) < 0:
            raise ValueError("activation_cache_bytes, host_memory_bytes and probe_steps are at least 0")
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


#: How blocks are first placed on devices.
#: - `replicate`: all chains on as few devices as hold them, and as many copies of that as fit.
#: - `partition`: one copy, cut over all devices.
#: - `on-demand`: one copy of each chain, on one device where it fits; more copies as load requires.
#: - `eager`: as `on-demand`, but devices that would stay empty get copies at once.
#: - `frag-min`: one copy of each block, placed separately where the least memory is left over (a paper's baseline).
#: - `auto`: `replicate` on few devices, `eager` on many.
Placement = Literal["auto", "replicate", "partition", "on-demand", "eager", "frag-min"]

#: What happens to models that do not fit the devices together. `fixed`: those that do not fit beside earlier ones are
#: not served. `swap`: every model that fits alone is served; its stages are loaded when requests need them, and others
#: are unloaded to make room (QL-13).
ResidencyMode = Literal["fixed", "swap"]

#: What models of one device have in common. `blocks`: every tensor that is equal, and the batches and pages of K and V
#: of the blocks made of such tensors. `models`: nothing, each model's weights are its own (the baseline of UN-04).
WeightSharing = Literal["blocks", "models"]

#: How a new sequence's path, and devices for more copies, are chosen if blocks have no profile. `least-bytes`: the path
#: with which all steps read the fewest bytes (`policy.routing.bytes_read`). `least-loaded`: the devices with the fewest
#: sequences.
Routing = Literal["least-bytes", "least-loaded"]

#: Where a running sequence continues if its device is busier than another one with the same blocks (BL-19, Figure 24).
#: - `strict`: on its device, where its K and V are.
#: - `owner`: it migrates, K and V copied and recomputed from both ends, if the gain exceeds the cost.
#: - `least-busy`: it migrates to the least busy device, and its K and V are copied.
#: - `recompute`: the same, and its K and V are recomputed.
Rebalancing = Literal["strict", "owner", "least-busy", "recompute"]


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Configure the scheduler's periodic controllers. Each mechanism has a switch: off, or its paper's baseline.

    Fields:
        scaling: Add and drop block instances by load (BL-24).
        rearranging: Move instances next to those with which they exchange rows (BL-26).
        locality: Place new instances near the instances that they exchange rows with; false: where the least memory is
            left over (frag-min).
        proactive: Migrate K and V of paused sequences before they resume (BL-17).
        rebalance: See `Rebalancing`.
        high: Load, as a share of what a device's memory takes, above which a block gets another instance: the paper's
            t.
        low: Load below which an instance counts as having room; see `policy.scaling.autoscale`.
        idle_ms: An instance without work for this long may be dropped; 0: none is.
        cooldown_ms: A block is not scaled again for this long; 0: at once.
        rearrange_interval_ms: Time between two rearrangements.
        interval_ms: Time between two checks of the load.
        migration_timeout_ms: A sequence that could not be moved within this time stays.
        rebalance_margin: A device gives sequences away if it has this many more than another.
        max_migrations: Migrations at once.
        bandwidth: Transfer rate of K, V and weights, in bytes per second, as assumed until it is measured.
        crossing_us: Time that a row loses between two servers, which is not measured; within one, as assumed at first.
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
        times = (self.rearrange_interval_ms, self.interval_ms, self.migration_timeout_ms)
        if min(self.idle_ms, self.cooldown_ms) < 0:
            raise ValueError("idle_ms and cooldown_ms of a cluster's control are at least 0")
        if (
            min(*times, self.max_migrations, self.rebalance_margin) < 1
            or not self.bandwidth > 0
            or not self.crossing_us >= 0
        ):
            raise ValueError("the periods of a cluster's control must be at least 1, its bandwidth more than 0")
        if not 0.0 <= self.low < self.high or self.rebalance not in get_args(Rebalancing):
            raise ValueError(f"control needs 0 <= low < high, and rebalance one of {', '.join(get_args(Rebalancing))}")

    @classmethod
    def off(cls) -> ControlConfig:
        """Return settings with all periodic mechanisms off."""
        return cls(scaling=False, rearranging=False, proactive=False)


#: Speculated hops (BL-25). `off`: none. `exact`: every token is the chain's own. `similarity`: for requests that allow
#: other blocks, a prediction that is similar enough is accepted.
SpeculationMode = Literal["off", "exact", "similarity"]
LaneChoice = Literal["own", "shared"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Configure speculation (BL-25).

    Fields:
        top: Share of block instances that are speculated, those with the longest queueing time first.
        threshold: Least cosine at which a prediction is accepted in mode `similarity`.
        lane: `own`: stand-ins run on a thread or stream of their own; `shared`: on the engine's, before the other rows.
        window: Number of an instance's last predictions from which its payoff is judged; 0: speculation never ends.
        rest: Controller ticks before an instance may be tried again after its speculation ended.
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
        """Return whether agents need a separate lane for stand-ins."""
        return self.mode != "off" and self.lane == "own"


#: Which sequences share the pages of equal prompt prefixes: none (`off`), running ones (`active`), or also ended ones,
#: with pages that stay until the memory is needed (`cached`).
PrefixCaching = Literal["off", "active", "cached"]


#: Which stages leave a device first to make room: those with the furthest next use among waiting sequences, or the
#: least recently used.
EvictionOrder = Literal["furthest", "lru"]


#: How devices of a sequence's hops are chosen (BL-23). `placed`: the scheduler chooses all of them. `broadcast`: the
#: scheduler chooses the first; agents offer each later hop to `broadcast_fanout` devices that can run it, and the first
#: bid gets it.
Dispatching = Literal["placed", "broadcast"]


#: What happens to K and V of sequences that give way (QL-11), where there is host memory. `auto`: they are kept there
#: if copying out and back takes less time than computing them again. `swap`: kept wherever there is room. `recompute`:
#: never kept.
PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Configure the scheduler of a cluster.

    Fields:
        devices: Devices that must have joined before blocks are placed.
        max_num_seqs: Sequences on a device at once.
        prefill_chunk: Tokens of a prompt that are sent as one row.
        watermark: Share of a device's pages that new sequences leave free.
        stride: Decode credit: tokens that a sequence may decode before its device reports them, on paths of one device.
        hop_cost: Cost of a change of device when paths are chosen: in sequences (`least-loaded`), or in hundredths of
            the bytes that a chain reads (`least-bytes`).
        migration_final_sets: A migration finishes once at most this many page sets are left.
        migration_max_stages: A migration fails after this many stages.
        owner_margin: A new sequence goes where its prefix is cached if that path costs at most this many sequences more
            than the cheapest. The margin holds for a fully cached prompt and shrinks in proportion for less (BL-19);
            infinite: always, if there is room.
        max_batch_per_block: Rows of a step that may pass one block instance, slots for expected rows included (BL-14,
            BL-22); 0: as many as a step takes.
        batch_gain: Limit each profiled block to the rows behind which another doubling raises its throughput by less
            than this share (`policy.batching.block_limits`); 0: no such limit.
        max_crashes: Devices in a row that may die while running a sequence's row; then the sequence fails. After the
            second death it runs beside no other such sequence, so that the one that kills devices can be identified.
        row_timeout_s: A row runs again if all devices of its path report no work for this long
            (`scheduler.decode.stall_detector`); the sequence fails after `max_crashes` such rows in a row. 0: no limit.
        residency: See `ResidencyMode`.
        eviction: Which stages leave first to make room: those with the furthest next use, or the least recently used.
        swap_patience_ms: Least time that a sequence waits for room before stages in use take no new sequences for it.
        preemption_mode: See `PreemptionMode`.
        shared_prompt_bytes: Host memory for hidden states of prompts, from which equal prompts of models with the same
            first layers start behind these (UN-15); 0: none are kept. On one device, with `prefix_caching`.
        dispatch: See `Dispatching`.
        broadcast_fanout: Devices that a hop is offered to.
        order: Which waiting sequence runs first.
        prefill_order: See `PrefillOrder`. Chunks have `prefill_chunk` tokens.
        prefill_window: Prompts that are sorted at a time, so that none waits behind all later ones (TI-07).
        background_share: By which share an answer may take longer for background sequences, the lines of batches, in
            the same steps (`policy.slo.background`); 0: they run as any sequence does.
        roles: What devices run, by their names; any other device runs everything. A sequence with a context computed
            on a device that does not decode is handed off to one that does (TI-15).
        role_changes: When the scheduler changes roles itself.
        decode: When and where sequences decode.
        lending: Whether K and V of a sequence may lie on devices that are not on its path.
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
    batch_gain: float = 0.0
    max_crashes: int = 4
    row_timeout_s: float = 30.0
    residency: ResidencyMode = "fixed"
    eviction: EvictionOrder = "furthest"
    swap_patience_ms: int = 200
    preemption_mode: PreemptionMode = "auto"
    shared_prompt_bytes: int = 256 << 20
    dispatch: Dispatching = "placed"
    broadcast_fanout: int = 3
    order: OrderConfig = field(default_factory=OrderConfig)
    prefill_order: PrefillOrder = "off"
    prefill_window: int = 16
    background_share: float = 0.0
    roles: tuple[tuple[str, RoleName], ...] = ()
    role_changes: RoleChangeConfig = field(default_factory=RoleChangeConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    lending: LendingConfig = field(default_factory=LendingConfig)

    def __post_init__(self) -> None:
        if self.prefill_order not in get_args(PrefillOrder):
            raise ValueError(f"prefill_order must be one of {', '.join(get_args(PrefillOrder))}")
        if any(role not in get_args(RoleName) for _, role in self.roles):
            raise ValueError(f"a role is one of {', '.join(get_args(RoleName))}")
        if self.roles and (why := without_roles(self)) is not None:
            raise ValueError(why)
        if self.lending.mode != "off" and (why := without_lending(self)) is not None:
            raise ValueError(why)
        if self.routing not in get_args(Routing):
            raise ValueError(f"routing must be one of {', '.join(get_args(Routing))}")
        if self.dispatch not in get_args(Dispatching) or self.broadcast_fanout < 2:
            raise ValueError("dispatch is placed or broadcast, and a hop is offered to at least 2 devices")
        if (
            self.prefix_caching not in get_args(PrefixCaching)
            or not self.owner_margin >= 0
            or self.max_batch_per_block < 0
            or not 0 <= self.batch_gain < 1
        ):
            raise ValueError(
                "prefix_caching must be off, active or cached, owner_margin and max_batch_per_block at least 0, "
                "batch_gain at least 0 and below 1"
            )
        if self.residency not in get_args(ResidencyMode) or self.eviction not in get_args(EvictionOrder):
            raise ValueError("residency is fixed or swap, eviction furthest or lru")
        if self.preemption_mode not in get_args(PreemptionMode):
            raise ValueError("preemption_mode is auto, swap or recompute")
        if min(self.swap_patience_ms, self.shared_prompt_bytes) < 0 or not 0.0 <= self.background_share < 100.0:
            raise ValueError("swap_patience_ms and shared_prompt_bytes are at least 0, background_share 0 to 100")
        if not 0 <= self.row_timeout_s < float("inf"):
            raise ValueError("row_timeout_s is a number of seconds, 0 for no limit")
        sizes = (self.devices, self.max_num_seqs, self.prefill_chunk, self.prefill_window, self.stride)
        whole = (*sizes, self.migration_final_sets, self.migration_max_stages)
        if min(*whole, self.max_crashes) < 1 or not 0.0 <= self.watermark < 1.0 or self.hop_cost < 0:
            raise ValueError("a cluster's numbers must be at least 1, its watermark in [0, 1)")
        if self.placement not in get_args(Placement):
            raise ValueError(f"placement must be one of {', '.join(get_args(Placement))}")


#: How the dense executor fills its slots: the four methods that the paper compares (Baton, section 5.1).
#: - `run-to-completion`: a batch admits no request until all of its requests are finished.
#: - `pd`: the same, but prompts run separately, in batches of similar length.
#: - `baton`: a new request takes a free slot at once; the inputs of running rows are padded to its prompt (vector
#:   shaping).
#: - `baton-pd`: prompts run separately, and their K and V are put into the free slot (vector embedding).
DenseMode = Literal["run-to-completion", "pd", "baton", "baton-pd"]

DensePadding = Literal["computed", "skipped"]

DensePrompts = Literal["beside", "before"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Configure the dense executor. No setting changes an answer.

    Fields:
        slots: Most rows in a model's batch.
        high: Share of the page pool above which rows are moved out (BA-15).
        low: Share of the page pool up to which rows are admitted (BA-15).
        padding: What happens to the padding in the rectangular windows. `computed`: it is computed, as in the paper.
            `skipped`: it is left out, unless a layer of the model does its own attention. The schedule is the same.
        prompts: Where batches of prompts run in the modes that run them apart (BA-08): on a thread of their own, beside
            the windows of decoding rows (`beside`), or before the window of the same step (`before`).
    """

    mode: DenseMode = "baton-pd"
    slots: int = 16
    high: float = 0.90
    low: float = 0.75
    padding: DensePadding = "skipped"
    prompts: DensePrompts = "before"

    def __post_init__(self) -> None:
        if self.slots < 1 or not 0.0 < self.low <= self.high <= 1.0:
            raise ValueError("slots must be at least 1, and 0 < low <= high <= 1")
        if self.mode not in get_args(DenseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(DenseMode))}")
        if self.padding not in get_args(DensePadding):
            raise ValueError(f"padding must be one of {', '.join(get_args(DensePadding))}")
        if self.prompts not in get_args(DensePrompts):
            raise ValueError(f"prompts must be one of {', '.join(get_args(DensePrompts))}")


#: Layout of linear layers' weights on a CPU: as stored and mapped (`plain`), in the layout that multiplies fastest
#: (`packed`), or the one measured to be faster on this machine (`auto`). There is always one copy of each weight.
Weights = Literal["auto", "plain", "packed"]

#: How int8 weights are computed with on a CPU with native kernels: as they are, or decompressed when they are loaded.
QuantizedWeights = Literal["native", "decompress"]


#: Kernels used on a CPU: torch's operations (`stock`), this project's kernels, compiled on first use (`native`), or
#: `native` if a compiler is available (`auto`).
KernelChoice = Literal["auto", "stock", "native"]


#: How native kernels multiply by bfloat16 weights: tiles (`amx`), AVX512-BF16 (`avx512`), float32 products of widened
#: values (`widen`), or the fastest of these that the processor has (`auto`).
Bf16Products = Literal["auto", "amx", "avx512", "widen"]


#: Whether decode steps are recorded once per shape and replayed without running their modules. `auto`: only as CUDA
#: graphs. `on`: everywhere; a CPU runs the modules again, which tests the rest of the mechanism.
GraphChoice = Literal["auto", "off", "on"]


#: Whether the next step is planned and launched before the tokens of the running step are known. `auto`: on GPUs. `on`:
#: everywhere; on a CPU, steps then run on a thread of their own, which measurements did not show to be faster.
AheadChoice = Literal["auto", "off", "on"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configure the engine of one device.

    Fields:
        kv_cache_memory_bytes: Size of the page pool, shared by all models.
        gpu_memory_utilization: Share of a GPU's memory that weights, page pool and work space may take together; the
            pool gets what the others leave (`kv.pool.share_of_device`). 0, and on CPUs: `kv_cache_memory_bytes`.
        weights_bytes: Weights for which the pool leaves memory on a GPU with `gpu_memory_utilization`.
        device_memory_bytes: On a CPU, memory of weights and pages together: pages get what the loaded weights leave,
            and at least `kv_cache_memory_bytes`. 0: pages always have that.
        page_tokens: Tokens per page for the model with the largest K and V per token; narrower models fit more tokens
            into a page. 0: what the device's attention kernel needs, 16 on a CPU.
        dtype: Dtype of the weights; None keeps each model's own.
        max_model_len: Cap on every model's context, in tokens.
        layers: `stock`: transformers' layers; `fused`: fewer and larger operations, for families that have them.
        weights, quantized, kernels, bf16_products, graphs, async_scheduling, weight_sharing: See the types above.
        host_memory_bytes: Host memory for weights of unloaded stages, ready to be loaded again.
        length_probes: Forecast lengths of answers with the models' stored probes (TI-10).
        trace_segments: Report each segment run to the trace; steps are then not recorded for replay.
        dense: Settings of the dense executor; the paged executor ignores them.
    """

    device: str = "cpu"
    kv_cache_memory_bytes: int = 1 << 30
    gpu_memory_utilization: float = 0.0
    weights_bytes: int = 0
    device_memory_bytes: int = 0
    page_tokens: int = 0
    dtype: str | None = None
    max_model_len: int | None = None
    layers: Literal["fused", "stock"] = "fused"
    weights: Weights = "auto"
    quantized: QuantizedWeights = "native"
    kernels: KernelChoice = "auto"
    bf16_products: Bf16Products = "auto"
    graphs: GraphChoice = "auto"
    async_scheduling: AheadChoice = "auto"
    host_memory_bytes: int = 0
    weight_sharing: WeightSharing = "blocks"
    length_probes: bool = False
    trace_segments: bool = False
    dense: DenseConfig = field(default_factory=DenseConfig)

    def __post_init__(self) -> None:
        if self.kv_cache_memory_bytes < 1 or (self.max_model_len is not None and self.max_model_len < 1):
            raise ValueError("kv_cache_memory_bytes and max_model_len must be positive")
        if not 0.0 <= self.gpu_memory_utilization <= 1.0:
            raise ValueError("gpu_memory_utilization is a share from 0 to 1")
        if min(self.page_tokens, self.weights_bytes, self.device_memory_bytes, self.host_memory_bytes) < 0:
            raise ValueError("page_tokens and numbers of bytes must be at least 0")
        if self.layers not in ("fused", "stock"):
            raise ValueError("layers must be fused or stock")
        if self.weight_sharing not in get_args(WeightSharing):
            raise ValueError(f"weight_sharing must be one of {', '.join(get_args(WeightSharing))}")
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights must be one of {', '.join(get_args(Weights))}")
        if self.quantized not in get_args(QuantizedWeights):
            raise ValueError(f"quantized must be one of {', '.join(get_args(QuantizedWeights))}")
        if self.kernels not in get_args(KernelChoice):
            raise ValueError(f"kernels must be one of {', '.join(get_args(KernelChoice))}")
        if self.bf16_products not in get_args(Bf16Products):
            raise ValueError(f"bf16_products must be one of {', '.join(get_args(Bf16Products))}")
        if self.bf16_products != "auto" and (self.kernels == "stock" or self.weights == "plain"):
            raise ValueError("bf16_products needs native kernels and packed weights")
        if self.graphs not in get_args(GraphChoice):
            raise ValueError(f"graphs must be one of {', '.join(get_args(GraphChoice))}")
        if self.async_scheduling not in get_args(AheadChoice):
            raise ValueError(f"async_scheduling must be one of {', '.join(get_args(AheadChoice))}")


#: Which requests are durable on a server with a queue.
Durability = Literal["keyed", "all"]


#: Seconds without a renewal after which a server's part in a queue of several ends.
QUEUE_LEASE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on files and batches.

    Fields:
        file_bytes: Of one uploaded file.
        total_bytes: Of all files of a queue.
        max_lines: Lines of a batch.
        max_unended: Batches of one server that have not ended.
        keep_seconds: Time for which files and ended batches are kept.
        interactive_share: By which share an interactive answer may take longer for lines in the same steps; 0: lines
            run in them as all other requests do.
    """

    file_bytes: int = 200 << 20
    total_bytes: int = 16 << 30
    max_lines: int = 50_000
    max_unended: int = 1000
    keep_seconds: int = 30 * 86400
    interactive_share: float = 0.05

    def __post_init__(self) -> None:
        if min(self.file_bytes, self.total_bytes, self.max_lines, self.max_unended, self.keep_seconds) < 1:
            raise ValueError("the limits of batches must be at least 1")
        if not 0.0 <= self.interactive_share < 100.0:
            raise ValueError("interactive_share is 0 to 100")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configure the HTTP server.

    Fields:
        max_body_bytes, max_choices, max_queued: Limits on what one client can cost.
        max_num_seqs: Sequences that the scheduler runs at once: how many lines of batches it is given.
        drain_seconds: Time for running requests to finish at shutdown.
        early_exit: Whether requests may use the first layers of a model only (BL-30).
        durable: With a queue, which requests outlive the server: those with an `Idempotency-Key`, or all.
        retention_hours: Time for which answers of such requests are kept.
        batches: Limits on files and batches.
        broker: URL of the RabbitMQ broker in which durable requests wait; None: they wait in the queue's tables.
        client_keys: Whether the store's keys of clients are taken beside `api_key`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    max_choices: int = 64
    max_queued: int = 4096
    max_num_seqs: int = 256
    drain_seconds: float = 30.0
    early_exit: bool = False
    durable: Durability = "keyed"
    retention_hours: float = 24.0
    batches: BatchLimits = BatchLimits()
    broker: str | None = field(default=None, repr=False)
    client_keys: bool = False

    def __post_init__(self) -> None:
        if self.durable not in get_args(Durability) or not 0 < self.retention_hours < float("inf"):
            raise ValueError("durable is keyed or all, and retention_hours above 0")
