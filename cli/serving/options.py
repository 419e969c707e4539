"""The options of `zoo serve`, declared once: defaults, then a TOML or JSON file, then the command line.

They are converted into the configurations of engine, agents, scheduler and server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from cli.serving.checks import check_values, roles_of
from cli.serving.decided import DENSE, SET_BY_OPTIONS
from cli.serving.memory import pool_bytes, shared_memory, weights_limit
from cli.serving.needs import require_effects
from cli.serving.server_config import adaptation_of, server_config
from cli.shared.declared import option, read_options, table_option
from cli.shared.sizes import size_of
from runtime.config import (
    QUEUE_LEASE_SECONDS,
    AgentConfig,
    AheadChoice,
    BatchLimits,
    Bf16Products,
    ClusterConfig,
    ControlConfig,
    DenseConfig,
    DenseMode,
    DensePadding,
    Dispatching,
    Durability,
    EngineConfig,
    EvictionOrder,
    GraphChoice,
    KernelChoice,
    LaneChoice,
    OrderConfig,
    Plan,
    PreemptionMode,
    PrefillOrder,
    PrefixCaching,
    QuantizedWeights,
    Rebalancing,
    ResidencyMode,
    Routing,
    ServerConfig,
    SpeculationConfig,
    SpeculationMode,
    Weights,
    WeightSharing,
)
from runtime.decode_config import DecodeConfig, DecodeRule, HandoffGrain, ReserveRule, UntilHandoff
from runtime.lending_config import LendingConfig, LendingMode
from runtime.policy.routing.variants import DispatchLimits
from runtime.role_config import RoleChangeConfig, RoleWatch
from runtime.shipped import SHIPPED_AGENT, SHIPPED_CLUSTER, Serving, agent_config, cluster_config
from zoo.errors import InputError

__all__ = ["ServeOptions", "gather", "require_effects", "size_of"]

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The values of all options, one field per option.

    Sizes are numbers of bytes or text such as `4GiB`. The backend `process` is a synonym of `processes`.
    """

    # fmt: off
    models: tuple[str, ...] = option((), group="Model", shown="all that can be served",
        help="Models to serve, by name or unique ending of it.")
    device: str = option("cpu", group="Model", help="Device of the engine: cpu, cuda or cuda:N.")
    dtype: str | None = option(None, group="Model", choices=("float32", "bfloat16", "float16"),
        shown="each model's own", help="Data type of weights and activations.")
    max_model_len: int | None = option(None, group="Model", shown="each model's own",
        help="Maximum context length (prompt and output) in tokens, of every model.")
    executor: str = option("auto", group="Model", choices=("auto", "paged", "dense"),
        help="Attention over a paged KV cache (paged), or left-padded batches as in Baton (dense); auto: paged, "
             "unless a model runs only dense or was measured to be faster so. Only with paged has a row the same bits "
             "beside any other rows.")
    layers: str = option("fused", group="Model", choices=("fused", "stock"),
        help="Transformer layers with fused operations, or transformers' own (stock; in bfloat16 the bits of a row may "
             "then depend on the rows beside it).")
    weights: str = option("auto", group="Model", choices=get_args(Weights),
        help="Layout of linear layers' weights on a CPU: as stored (plain), repacked for the matrix kernels "
             "(packed), or the one measured to be faster (auto). With plain the bits of a row may depend on the rows "
             "beside it.")
    kernels: str = option("auto", group="Model", choices=get_args(KernelChoice),
        help="Kernels on a CPU: compiled on first use (native), or torch's (stock); auto: native where there is a C "
             "compiler. With stock the bits of a row may depend on the rows beside it.")
    quantized: str = option("native", group="Model", choices=get_args(QuantizedWeights),
        help="How int8 weights are multiplied by on a CPU: as they are (native), or decompressed on loading.")
    bf16_products: str = option("auto", group="Model", choices=get_args(Bf16Products), needs=["native kernels"],
        help="How native kernels multiply by bfloat16 weights: tiles (amx), AVX512-BF16 (avx512), or as float32 "
             "(widen); auto: the first of these that the processor has.")
    graphs: str = option("auto", group="Model", choices=get_args(GraphChoice),
        help="Replay decode steps as CUDA graphs; auto: on CUDA.")

    kv_cache_memory_bytes: int | str | None = option(None, group="Memory",
        shown="1GiB; on a GPU what --gpu-memory-utilization leaves",
        help="Size of the KV cache of one device, shared by all models: 512MB, 4GiB.")
    agent_kv_bytes: int | str | None = option(None, group="Memory", needs=["several devices"],
        shown="--kv-cache-memory-bytes for each",
        help="Size of the KV cache of each agent, separated by commas in their order: 64MiB,1GiB. One size is for all.")
    gpu_memory_utilization: float = option(0.9, group="Memory", needs=["a GPU's share"],
        help="Share of a GPU's memory for weights, KV cache and work space together; the KV cache gets what the others "
             "leave.")
    block_size: int = option(0, group="Memory", needs=["paged"], shown="16; on a GPU what its attention kernel reads",
        help="Tokens in a page of the KV cache, for the model with the widest tokens.")
    prefix_caching: str = option(SHIPPED_CLUSTER.prefix_caching, group="Memory", choices=get_args(PrefixCaching),
        help="Share KV pages of equal prompt prefixes: off, with running sequences (active), or also with ended "
             "ones, while their memory is not needed (cached).")
    shared_prompts: int | str = option("256MiB", group="Memory", needs=["one device", "paged"],
        help="Host memory for hidden states of prompts: an equal prompt of a model with the same first layers shares "
             "their pages, and runs only the layers behind them; 0: nothing is shared between models.")
    device_memory: int | str = option(0, group="Memory",
        help="Memory of one device for weights and KV cache together; 0: no limit. On a CPU the KV cache gets what the "
             "loaded weights leave; with --kv-cache-memory-bytes, and on a GPU, it has that share.")
    agent_weights: int | str = option(0, group="Memory",
        help="Maximum size of the weights on one device, in place of --device-memory; 0: no limit.")
    host_memory: int | str = option(0, group="Memory",
        help="Host memory of a device for K and V of requests that give way, and for unloaded weights; 0: none.")
    preemption_mode: str = option(SHIPPED_CLUSTER.preemption_mode, group="Memory", needs=["host memory"],
        choices=get_args(PreemptionMode), help="K and V of requests that give way: kept in host memory (swap), "
             "computed again (recompute), or the cheaper of both (auto).")
    residency: str = option(SHIPPED_CLUSTER.residency, group="Memory", needs=["memory limit"],
        choices=tuple(reversed(get_args(ResidencyMode))),
        help="Models that do not fit together: loaded when requests need them, in place of unused ones (swap), or not "
             "served (fixed).")
    eviction: str = option(SHIPPED_CLUSTER.eviction, group="Memory", needs=["memory limit"],
        choices=get_args(EvictionOrder),
        help="Weights that leave first: those that waiting requests need last (furthest), or least recently used ones.")
    weight_sharing: str = option("blocks", group="Memory", choices=get_args(WeightSharing),
        help="What models share: equal weights, once in memory and in one batch (blocks), or nothing (models).")
    activation_cache_bytes: int | str = option(SHIPPED_AGENT.activation_cache_bytes, group="Memory",
        needs=["several devices"],
        help="Size of an agent's host-memory cache of block inputs, from which a migration can recompute blocks in "
             "the middle of a chain; 0: none.")

    plan: str = option(SHIPPED_CLUSTER.order.plan, group="Queue", choices=get_args(Plan),
        help="Which waiting request is first: by priority and arrival, each model apart (off) or all in one strict "
             "queue (fcfs); by priority and deadline, arrival plus slo_ms (edf); by deadline, late ones last, running "
             "ones give way, models that do not fit together in a planned order (qlm; paper: by its equations).")
    order: OrderConfig = table_option(OrderConfig, group="Queue", without=["plan"], needs=["deadlines"],
        help="Deadline of requests without slo_ms, whether running requests give way, plans, and overload.")

    max_num_batched_tokens: int | None = option(None, group="Batching",
        shown=f"{SHIPPED_AGENT.max_num_batched_tokens}, or a longer chunk", help="Maximum number of tokens in a step.")
    long_prefill_token_threshold: int = option(0, group="Batching", needs=["paged"], shown="as measured",
        help="Tokens of a prompt that run in one step at most. 0: the chunk that zoo profile --chunks chose for a "
             "model here, else what a step leaves (up to 256 on several devices).")
    max_num_seqs: int = option(SHIPPED_CLUSTER.max_num_seqs, group="Batching",
        help="Maximum number of sequences in a step.")
    max_batch_per_block: int = option(SHIPPED_CLUSTER.max_batch_per_block, group="Batching",
        help="Maximum number of rows of a step that run through one block; 0: no limit of its own.")
    prefill_order: str = option(SHIPPED_CLUSTER.prefill_order, group="Batching", choices=get_args(PrefillOrder),
        needs=["paged"],
        help="Order of the prompts that wait for one device: each runs when it can (off), or in chunks "
             "that several prompts fill: by arrival (fcfs), the shortest (sjf) or the longest "
             "(ljf) of a window of prompts first.")
    decode_admission: str = option(SHIPPED_CLUSTER.decode.admission, group="Batching", choices=get_args(ReserveRule),
        needs=["paged"],
        help="Pages that must be free before a sequence decodes on a device: those of its context (greedy), also those "
             "it is expected to grow to (static), those of all until the first of them ends (dynamic), or until all "
             "have ended (peak).")
    decode_choice: str = option(SHIPPED_CLUSTER.decode.choice, group="Batching", choices=get_args(DecodeRule),
        needs=["several devices"],
        help="Which path decodes a sequence with a prompt that ran elsewhere: the one with the fewest sequences "
             "(load), or by the share of long answers there: the better of two drawn (po2), the best (least), any "
             "(random), or the worst.")
    handoff_grain: str = option(SHIPPED_CLUSTER.decode.grain, group="Batching", choices=get_args(HandoffGrain),
        needs=["roles"],
        help="When K and V of a prompt go to where its answer is decoded: all of them when it is computed (request), "
             "each chunk of it (chunk), or also each layer of its last chunk (layer).")
    until_handoff: str = option(SHIPPED_CLUSTER.decode.until_handoff, group="Batching", choices=get_args(UntilHandoff),
        needs=["roles"],
        help="What a sequence does from its first token until its K and V are where it is to decode: it rests, or "
             "decodes where its prompt ran.")
    local_prefill: int = option(SHIPPED_CLUSTER.decode.local_prefill, group="Batching",
        needs=["roles", "prefixes"],
        help="Run a prompt where its answer is decoded if a cached prefix there leaves at most so many of its tokens; "
             "it is not handed off then. 0: never.")
    decode: DecodeConfig = table_option(DecodeConfig, group="Batching",
        without=["admission", "choice", "grain", "until_handoff", "local_prefill"],
        needs=["expected lengths"],
        help="By how much expected lengths of answers are exceeded, and how old loads of devices may be.")
    lengths: str = option("off", group="Batching", choices=("off", "parallel", "sequential", "probe"),
        needs=["expected lengths"],
        help="Predict how long answers get, by the models' stored predictors (zoo lengths): beside prompts (parallel) "
             "or before them (sequential), or by probes of the hidden states with which their prompts end (probe).")
    prefill_window: int = option(SHIPPED_CLUSTER.prefill_window, group="Batching", needs=["prefill order"],
        help="Prompts that are sorted at a time: a long one waits at most for those of its window.")
    batch_wait_us: int = option(SHIPPED_AGENT.batch_wait_us, group="Batching", needs=["due rows"],
        help="Longest wait of an agent's step, in microseconds, for rows that are due back, so that they run in one "
             "batch; 0: no wait.")
    async_scheduling: str = option("auto", group="Batching", needs=["paged"], choices=get_args(AheadChoice),
        help="Plan and launch the next step while the current one runs; auto: on CUDA.")
    decode_credit: int = option(0, group="Batching",
        help="Tokens of a sequence that a device may decode before it reports them; 0: 8 where steps are launched "
             "ahead, else 1.")
    dense_mode: str = option("baton-pd", group="Batching", needs=["dense"], choices=get_args(DenseMode),
        help="How dense batches take new rows in: embedding prefilled K and V (baton-pd), padding beside running "
             "rows (baton), prefill apart (pd), or not before the batch ends.")
    dense_slots: int = option(16, group="Batching", needs=["dense"], help="Rows of a dense batch.")
    dense_padding: str = option("skipped", group="Batching", needs=["dense"], choices=get_args(DensePadding),
        help="Whether padding of dense batches is skipped, or computed as in the paper.")
    dense_prompts: str = option("before", group="Batching", needs=["dense"], choices=("before", "beside"),
        help="Where prompts run that are prefilled apart: before the window of the decoding rows, or beside it.")

    agents: int = option(1, group="Cluster",
        help="Number of devices, each with an agent, over which chains of blocks are spread.")
    backend: str = option("auto", group="Cluster",
        choices=("auto", "inline", "local", "threads", "process", "processes", "ray"),
        help="Where agents run: in processes, threads, or Ray actors; inline or local: one, in the scheduler's thread. "
             "auto: inline for one device, else processes.")
    roles: str | None = option(None, group="Cluster", needs=["several devices"], shown="both for each",
        help="What each agent runs, separated by commas: prompts (prefill), the tokens behind them (decode), or "
             "everything (both). After its first token a request's K and V go from an agent for prompts to one that "
             "decodes. Every model is loaded on agents of both kinds, and stays there.")
    role_changes: str = option(SHIPPED_CLUSTER.role_changes.watch, group="Cluster", choices=get_args(RoleWatch),
        needs=["roles"],
        help="Whether an agent gets the other role while agents of that are short: none, until POST /zoo/roles (off), "
             "one whose load the rest of its role can take (spare), or one with little load (idle).")
    role_watch: RoleChangeConfig = table_option(RoleChangeConfig, group="Cluster", without=["watch"],
        needs=["role watch"],
        help="When an agent is idle, when agents need help, and how long an agent may take to leave its role.")
    lending: str = option(SHIPPED_CLUSTER.lending.mode, group="Cluster", choices=get_args(LendingMode),
        needs=["several devices"],
        help="Whether agents without free pages lend K and V of a running request to another one, which attends to "
             "them, so that it may be longer than its agent's memory: no (off); to the agent with the most free pages "
             "(planned); or to one that a manager of the pool, which knows agents' heartbeats only, recommends and "
             "that grants it (negotiated).")
    loans: LendingConfig = table_option(LendingConfig, group="Cluster", without=["mode"], needs=["lending"],
        help="How much an agent lends, up to which load, how long it may take to attend, and with negotiated the "
             "managers of the pool.")
    placement: str = option(SHIPPED_CLUSTER.placement, group="Cluster", needs=["several devices"],
        choices=("auto", "replicate", "partition", "on-demand", "eager"),
        help="Where blocks are first placed: copies of all chains (replicate), one copy cut over all devices "
             "(partition), one copy and more by load (on-demand; eager: empty devices get copies at once); auto: "
             "replicate on at most four devices, else eager.")
    routing: str = option(SHIPPED_CLUSTER.routing, group="Cluster", needs=["several devices"],
        choices=tuple(reversed(get_args(Routing))),
        help="How a new sequence's path is chosen where blocks were not profiled (zoo profile): devices with the "
             "fewest sequences, or the fewest bytes read by all steps.")
    rebalance: str = option(SHIPPED_CLUSTER.control.rebalance, group="Cluster", needs=["several devices"],
        choices=get_args(Rebalancing),
        help="Migration of running sequences away from busy devices: never (strict), where it gains more than it "
             "costs (owner), or always to the least busy device, K and V copied (least-busy) or re"
             "(recompute).")
    dispatch: str = option(SHIPPED_CLUSTER.dispatch, group="Cluster", needs=["several devices"],
        choices=get_args(Dispatching),
        help="Which device runs a hop: decided by the scheduler (placed), or offered to several devices, of which "
             "the first to answer gets it (broadcast).")
    tensor_transport: str = option("host", group="Cluster", needs=["several devices"],
        choices=("host", "direct", "network"),
        help="How tensors pass between agents: through host memory (host), device to device by NCCL or gloo on one "
             "machine (direct), or also between machines, unencrypted, for a trusted network (network).")
    control: ControlConfig = table_option(ControlConfig, group="Cluster", without=["rebalance"],
        needs=["several devices"],
        help="The scheduler's periodic controllers: scaling, placement by locality, proactive migration.")
    cluster_limits: ClusterConfig = table_option(ClusterConfig, group="Cluster", without=SET_BY_OPTIONS,
        help="Limits of the scheduler, of one device as of several.")

    speculation: str = option(SHIPPED_CLUSTER.speculation.mode, group="Approximations", needs=["several devices"],
        choices=get_args(SpeculationMode),
        help="Run stored surrogates ahead of hops with long queues: exact keeps every token the model's own; "
             "similarity accepts predictions that are similar enough, in adaptive requests.")
    speculation_lane: str = option(SHIPPED_CLUSTER.speculation.lane, group="Approximations", needs=["speculation"],
        choices=get_args(LaneChoice),
        help="Surrogates run on a thread or CUDA stream of their own, or before the other steps (shared).")
    speculation_limits: SpeculationConfig = table_option(SpeculationConfig, group="Approximations",
        needs=["speculation"], without=["mode", "lane"],
        help="Which hops are predicted, and which predictions are accepted.")
    serve_deltas: bool = option(False, group="Approximations",
        help="Answer adaptive requests by a model's low-rank delta where that is served too, or by composed models "
             "that were scored against it.")
    early_exit: bool = option(False, group="Approximations",
        help="Accept `early_exit` in requests: the layer behind which their model is left (zoo exits --make).")
    adaptive: str = option("latency", group="Approximations", choices=("latency", "accuracy"),
        help="What adaptive requests get where their model has variants: the fastest one, or the most accurate one.")
    adaptive_ms: float = option(0.0, group="Approximations", shown="0",
        help="With --adaptive accuracy, the longest step in milliseconds; 0: no limit.")
    min_equivalence: float = option(0.98, group="Approximations",
        help="Minimum similarity of blocks that replace a model's own in adaptive requests (zoo ingest --threshold).")
    min_stitched: float = option(0.95, group="Approximations", needs=["deltas"],
        help="Minimum similarity of chains with stitches.")

    trace: str | None = option(None, group="Observability",
        help="Write every event to this file (JSON lines), and serve /zoo/trace.")
    otlp_traces_endpoint: str | None = option(None, group="Observability",
        help="Send OpenTelemetry spans of requests to this OTLP/HTTP address: http://host:4318/v1/traces.")
    scheduler_log: str | None = option(None, group="Observability",
        help="Log all events of the scheduler, prompts included, for zoo simulate --replay.")

    host: str = option("127.0.0.1", group="Server", help="Address to listen on.")
    port: int = option(8000, group="Server", help="Port to listen on; 0: any free one.")
    api_key: str | None = option(None, group="Server", envvar="ZOO_API_KEY", help="API key that requests must present.")
    client_keys: bool = option(False, group="Server",
        help="Also take the keys that `zoo key` makes, each with its models and limits. Needs --api-key.")
    max_queued: int = option(4096, group="Server",
        help="Maximum number of sequences in the server, running and waiting; further requests get status 429.")
    drain_seconds: float = option(30.0, group="Server", shown="30",
        help="Longest wait for running requests after SIGTERM, in seconds.")
    queue: str = option("off", group="Server",
        help="Keep durable requests, which outlive the server, in this folder or database (postgresql://…).")
    broker: str | None = option(None, group="Server", needs=["queue"],
        help="RabbitMQ broker (amqp://…) in which durable requests wait until a server of the queue has room.")
    durable: str = option("keyed", group="Server", needs=["queue"], choices=get_args(Durability),
        help="Which requests are durable: those with an Idempotency-Key, or all.")
    retention_hours: float = option(24.0, group="Server", shown="24", needs=["queue"],
        help="Time for which answers of durable requests are kept, in hours.")
    lease_seconds: float = option(QUEUE_LEASE_SECONDS, group="Server", shown="10", needs=["shared queue"],
        help="Seconds without a sign of life after which other servers of the queue take over what this one runs.")
    batches: BatchLimits = table_option(BatchLimits, group="Server", needs=["queue"], help="Limits on batches.")
    # fmt: on

    @property
    def clustered(self) -> bool:
        """Whether agents outside the scheduler's thread were requested."""
        return self.agents > 1 or self.backend not in ("auto", "local", "inline")

    @property
    def on_demand(self) -> bool:
        """Whether models are served once a request names them: where memory is limited, and no models are named."""
        swaps = self.residency == "swap" and self.weights_limit > 0 and not self.roles
        return swaps and not (self.models or self.early_exit or self.serve_deltas or self.executor == "dense")

    def settled(self) -> ServeOptions:
        """Return the options with the backend decided: one device is run by an agent in the scheduler's thread."""
        if self.backend not in ("auto", "local"):
            return self
        return replace(self, backend="processes" if self.agents > 1 else "inline")

    def engine(self) -> EngineConfig:
        """Return the engine's configuration. Raises InputError."""
        sized = self.kv_cache_memory_bytes is not None or bool(self.agent_kv_bytes or size_of(self.device_memory))
        on_gpu = self.device.startswith("cuda") and not sized
        return _built(
            EngineConfig,
            device=self.device,
            dtype=self.dtype,
            layers=self.layers,
            weights=self.weights,
            kernels=self.kernels,
            bf16_products=self.bf16_products,
            quantized=self.quantized,
            graphs=self.graphs,
            async_scheduling=self.async_scheduling,
            kv_cache_memory_bytes=pool_bytes(self),
            device_memory_bytes=self.shared_memory,
            gpu_memory_utilization=self.gpu_memory_utilization if on_gpu else 0.0,
            page_tokens=self.block_size,
            max_model_len=self.max_model_len,
            host_memory_bytes=size_of(self.host_memory),
            weight_sharing=self.weight_sharing,
            length_probes=self.lengths == "probe",
            trace_segments=self.trace is not None,
            dense=_built(DenseConfig, **{name: getattr(self, f"dense_{name}") for name in DENSE}),
        )

    @property
    def serving(self) -> Serving:
        """What the configurations of scheduler and agents depend on beside their own options."""
        ahead = self.async_scheduling == "on" or (
            self.async_scheduling == "auto" and self.device.split(":")[0] != "cpu"
        )
        return Serving(
            self.agents, self.backend == "inline", ahead, self.decode_credit, self.long_prefill_token_threshold
        )

    @property
    def step_tokens(self) -> int:
        """Tokens of a step at most: as given, else as shipped, or more where a prompt's chunk is longer."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(SHIPPED_AGENT.max_num_batched_tokens, self.long_prefill_token_threshold)

    def cluster(self) -> ClusterConfig:
        """Return the cluster's configuration. Raises InputError."""
        chosen: ClusterConfig = _built(
            replace, self.cluster_limits, placement=self.placement, max_num_seqs=self.max_num_seqs,
            speculation=_built(replace, self.speculation_limits, mode=self.speculation, lane=self.speculation_lane),
            prefix_caching=self.prefix_caching, max_batch_per_block=self.max_batch_per_block, routing=self.routing,
            control=_built(replace, self.control, rebalance=self.rebalance), dispatch=self.dispatch,
            residency="fixed" if self.roles else self.residency, eviction=self.eviction, roles=roles_of(self),
            role_changes=_built(replace, self.role_watch, watch=self.role_changes),
            lending=_built(replace, self.loans, mode=self.lending),
            shared_prompt_bytes=size_of(self.shared_prompts),
            order=_built(replace, self.order, plan=self.plan), preemption_mode=self.preemption_mode,
            prefill_order=self.prefill_order, prefill_window=self.prefill_window,
            decode=_built(replace, self.decode, admission=self.decode_admission, choice=self.decode_choice,
                          grain=self.handoff_grain, until_handoff=self.until_handoff,
                          local_prefill=self.local_prefill),
            background_share=0.0 if self.queue == "off" else self.batches.interactive_share,
        )  # fmt: skip
        made: ClusterConfig = _built(cluster_config, self.serving, chosen, self.step_tokens)
        return made

    @property
    def weights_limit(self) -> int:
        """Bytes of weights that one device holds at most, 0 for no limit. Raises InputError for sizes that are none."""
        return weights_limit(self)

    @property
    def shared_memory(self) -> int:
        """Bytes of one device of which the KV cache gets what weights leave; 0: it has a fixed share."""
        return shared_memory(self)

    def adaptation(self) -> DispatchLimits:
        return adaptation_of(self)

    def agent(self) -> AgentConfig:
        """Return the agents' configuration. Raises InputError."""
        chosen: AgentConfig = _built(
            AgentConfig, max_num_batched_tokens=self.step_tokens, max_num_seqs=self.max_num_seqs,
            batch_wait_us=self.batch_wait_us, activation_cache_bytes=size_of(self.activation_cache_bytes),
            host_memory_bytes=size_of(self.host_memory), length_probes=self.lengths == "probe",
            probe_steps=self.decode.probe_steps,
        )  # fmt: skip
        return agent_config(self.serving, chosen)

    def server(self) -> ServerConfig:
        return server_config(self)


def gather(file: Path | None, given: Mapping[str, Any]) -> ServeOptions:
    """Return checked options from a file overlaid by the command line (None: not given). Raises InputError."""
    options = read_options(ServeOptions, file, given)
    check_values(options)
    options.agent()  # raises for limits that no step can have
    if options.roles or options.lending != "off":
        options.cluster()  # raises for options that these exclude
    require_effects(options)
    return options


def _built(kind: Callable[..., C], *given: Any, **values: Any) -> C:
    try:
        return kind(*given, **values)
    except ValueError as error:
        raise InputError(str(error)) from None
