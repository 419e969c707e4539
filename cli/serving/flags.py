"""The options of `zoo serve` as the command line words them: one per field of `serve_options.ServeOptions`, where None
means not given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models to serve; all when none is named.")
]
Models = Annotated[list[str] | None, typer.Option("--models", help="The same, as an option: --models A B.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.", show_default="8000")]
ApiKey = Annotated[str | None, typer.Option(envvar="ZOO_API_KEY", help="Key that every request must bring.")]
Trace = Annotated[str | None, typer.Option(help="Write every event to this file (JSON lines), and keep /zoo/trace.")]
Otel = Annotated[
    str | None,
    typer.Option(help="Send requests as OpenTelemetry spans to this OTLP/HTTP address: http://host:4318/v1/traces."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="cpu")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="each model's own")]
Layers = Annotated[str | None, typer.Option(help="fused, or stock: transformers' own layers.", show_default="fused")]
Weights = Annotated[
    str | None,
    typer.Option(help="plain, packed, or auto: how a CPU holds the weights of linear layers.", show_default="auto"),
]
Kernels = Annotated[
    str | None, typer.Option(help="native: compiled on first use; stock: torch's own; or auto.", show_default="auto")
]
Graphs = Annotated[
    str | None,
    typer.Option(help="on, off, or auto: decode steps as CUDA graphs, where there is CUDA.", show_default="auto"),
]
AsyncScheduling = Annotated[
    str | None,
    typer.Option(
        help="on, off, or auto: plan and launch a step while the one before still runs, where there is CUDA.",
        show_default="auto",
    ),
]
Executor = Annotated[
    str | None,
    typer.Option(help="paged, or dense: what some families need, and any model can have.", show_default="auto"),
]
DenseMode = Annotated[
    str | None,
    typer.Option(
        help="baton-pd, baton, pd or run-to-completion: how dense batches are filled.", show_default="baton-pd"
    ),
]
DenseSlots = Annotated[int | None, typer.Option(help="Rows of a dense batch.", show_default="16")]
DensePadding = Annotated[
    str | None,
    typer.Option(help="skipped, or computed as in the paper: the padding of dense batches.", show_default="skipped"),
]
KvBytes = Annotated[str | None, typer.Option(help="Size of the page pool of all models.", show_default="1GiB")]
MaxModelLen = Annotated[int | None, typer.Option(help="Cap on every model's context, in tokens.")]
TokenBudget = Annotated[int | None, typer.Option(help="Tokens per step.", show_default="512")]
MaxSequences = Annotated[int | None, typer.Option(help="Sequences per step.", show_default="256")]
MaxQueued = Annotated[
    int | None, typer.Option(help="Sequences in the server at once; more get 429.", show_default="4096")
]
DrainSeconds = Annotated[
    float | None, typer.Option(help="Patience with running requests on SIGTERM.", show_default="30")
]
Log = Annotated[
    str | None, typer.Option(help="Write all that the scheduler is told here, prompts too, for zoo simulate --replay.")
]
Agents = Annotated[
    int | None, typer.Option(help="Devices, each with an agent, that chains are spread over.", show_default="1")
]
Backend = Annotated[
    str | None,
    typer.Option(
        help="Where agents run: processes, threads of this one, or ray (an extra); inline: one, in the scheduler's "
        "thread; local: one "
        "device without a scheduler. auto: inline for one device, or local where it runs dense or looks ahead; "
        "processes for more.",
        show_default="auto",
    ),
]
Placing = Annotated[
    str | None,
    typer.Option(
        help="Where blocks are put: copies on each agent, split over all, demand: one copy and more by load, or auto.",
        show_default="auto",
    ),
]
Sharing = Annotated[
    str | None,
    typer.Option(
        help="Agents share pages of prompts that begin alike: off, running, or cached (ended ones too).",
        show_default="running",
    ),
]
Balancing = Annotated[
    str | None,
    typer.Option(
        help="A sequence whose agent is busier than another: strict, it stays; owner, it moves where that gains more "
        "than it costs; "
        "least-busy or recompute, it always moves, its K and V copied or computed again.",
        show_default="strict",
    ),
]
Tensors = Annotated[
    str | None,
    typer.Option(
        help="How hidden states, K and V go from agent to agent: host, through the host's memory; direct, from device "
        "to device (NCCL, on "
        "CPUs gloo) on one machine; network, between machines, too, unencrypted: for a network that is trusted.",
        show_default="host",
    ),
]
Dispatch = Annotated[
    str | None,
    typer.Option(
        help="Who says which of several agents runs a hop: placed, the scheduler; broadcast, it is offered to them "
        "and the first takes it.",
        show_default="placed",
    ),
]
BlockRows = Annotated[
    int | None,
    typer.Option(help="Rows of an agent's step through one block; 0 for as many as a step takes.", show_default="0"),
]
Paths = Annotated[
    str | None,
    typer.Option(
        help="Where newcomers go whose blocks were not profiled (zoo profile): loads: to agents with few sequences; "
        "reads: where all "
        "steps then read the fewest bytes.",
        show_default="loads",
    ),
]
LingerUs = Annotated[
    int | None,
    typer.Option(
        help="An agent's step waits up to so many microseconds for sequences that are due back, so that they meet in one batch; 0: never.",
        show_default="2000",
    ),
]
Speculation = Annotated[
    str | None,
    typer.Option(
        help="Predict hops with long queues by the zoo's surrogates: off; exact: every token is the chain's own; similarity: in "
        "adaptive requests predictions stand that are alike enough.",
        show_default="off",
    ),
]
SpeculationLane = Annotated[
    str | None,
    typer.Option(
        help="Surrogates run in a lane of their own: own (a thread, or a CUDA stream), or shared: before the other steps.",
        show_default="own",
    ),
]
AgentWeights = Annotated[
    str | None, typer.Option(help="Bytes of weights that an agent takes; 0 for any.", show_default="0")
]
BoundaryBytes = Annotated[
    str | None,
    typer.Option(
        help="Bytes of what comes into its blocks that an agent keeps in the host's memory, so that blocks in the middle of a chain can be "
        "recomputed where they move to; 0 for none: they are copied.",
        show_default="0",
    ),
]
Deltas = Annotated[
    bool | None,
    typer.Option(
        "--deltas",
        help="Serve adaptive requests by a model's low-rank rewriting, where that is served too; over agents also by composed models "
        "that were scored against it.",
    ),
]
EarlyExit = Annotated[
    bool | None,
    typer.Option(
        "--early-exit",
        help="Requests may say behind how many layers their model is left (`early_exit`), where `zoo exits --make` has made that exit.",
    ),
]
Adaptive = Annotated[
    str | None,
    typer.Option(
        help="With agents and --deltas, adaptive requests get what is fastest (latency) or the best score (accuracy).",
        show_default="latency",
    ),
]
AdaptiveMs = Annotated[
    float | None,
    typer.Option(help="Accuracy comes first up to so many milliseconds a step; 0 for always.", show_default="0"),
]
Equivalent = Annotated[
    float | None, typer.Option(help="The least score of blocks that stand in for a model's own.", show_default="0.98")
]
Stitched = Annotated[float | None, typer.Option(help="The same of chains with stitches.", show_default="0.95")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML or JSON file with the same options.", dir_okay=False)]
