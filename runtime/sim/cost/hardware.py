"""The papers' hardware as a table: devices, servers and links, with peak figures and the shares reached in practice.

Peak figures are from NVIDIA's data sheets (16-bit floating point, dense). The shares were set once, from published
measurements of engines of the papers' time, and never fitted to a figure of a paper:

- large matrix products reach about half the peak,
- reading weights about 80 % of the memory bandwidth,
- the first paged attention kernels about 60 % of it,
- a link about 94 % of its line rate after headers.

Kinds named `-tetri` are apart from that: products of few tokens are slower than the roofline says, and so is attention
within prompts. `benchmarks.simulated.tetri_fit` fitted three parameters to TetriInfer's Figures 2 to 4, for OPT-13B on
two V100 (TI-09). One V100 and the A100 take them over; no figure of the paper is of them. `2xV100`: two devices that
split every matrix, as one device, with the sums between them in its shares.

`2xA100-80GB` to `32xA100-80GB` are devices that split every matrix, too, with the two sums of each layer apart
(`split_gpu`): launches do not get fewer with devices, and sums get slower. Their times are assumed: about what NCCL
takes for small and for large arrays over NVLink, and over a network card for each device beyond eight.

Per layer 60 us cannot be hidden (launches that the device waits for), and per step 0.5 ms (the engine's own work). A
scenario names the kinds that it has. Units: bytes, seconds, bytes per second; latencies in ns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from zoo.errors import InputError

GB = 10**9
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of device.

    Fields:
        memory: Bytes.
        bandwidth: Bytes per second, peak.
        flops: Operations per second, peak.
        weights_share, attention_share, compute_share: Shares of the peaks that are reached.
        layer_ns: Time per layer and step that no computing hides.
        part_ns: The same once per step of the device.
        half_tokens: Tokens in a step at which matrix products reach half of `compute_share`; 0: any number reaches it.
        prompt_share: Share of the peak that attention within prompts reaches; 0: `compute_share`.
        sum_ns: Time of each sum over the devices that split a layer, two of them a layer, however small it is.
        sum_bandwidth: Bytes of hidden states per second that such a sum takes beside that; 0: any number at once.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    weights_share: float = 0.80
    attention_share: float = 0.60
    compute_share: float = 0.50
    layer_ns: int = 60_000
    part_ns: int = 500_000
    half_tokens: float = 0.0
    prompt_share: float = 0.0
    sum_ns: int = 0
    sum_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        if min(self.memory, self.bandwidth, self.flops) <= 0 or not all(0 < share <= 1 for share in self._shares):
            raise InputError(f"{self.name}: memory, bandwidth and flops are positive, shares above 0 and up to 1")
        if min(self.layer_ns, self.part_ns, self.half_tokens, self.sum_ns, self.sum_bandwidth) < 0:
            raise InputError(f"{self.name}: times and half_tokens are not negative")

    @property
    def pairs_share(self) -> float:
        """Share of the peak that attention within prompts reaches."""
        return self.prompt_share or self.compute_share

    @property
    def _shares(self) -> tuple[float, float, float, float]:
        return self.weights_share, self.attention_share, self.compute_share, self.pairs_share


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One direction of a link. `bandwidth`: bytes per second after headers; `latency`: ns until the first byte."""

    name: str
    bandwidth: float
    latency: int

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0:
            raise InputError(f"{self.name}: a link has a positive bandwidth and no negative latency")

    def busy_ns(self, nbytes: int) -> int:
        """Return how long so many bytes occupy the link, in ns."""
        return round(nbytes * 1e9 / self.bandwidth)


def _tetri(gpu: Gpu, name: str) -> Gpu:
    """Return a kind of device with the parameters of TetriInfer's figures."""
    return replace(gpu, name=name, compute_share=0.666, half_tokens=102.0, prompt_share=0.0905)


def split_gpu(gpu: Gpu, count: int) -> Gpu:
    """Return so many devices, a power of two, that split every matrix; up to eight are on one server."""
    if count < 2 or count & (count - 1):
        raise InputError(f"{count} devices do not split a layer: a power of two from 2 on does")
    inside, between = min(count, 8).bit_length() - 1, max(count // 8, 1).bit_length() - 1
    return replace(
        gpu,
        name=f"{count}x{gpu.name}",
        memory=count * gpu.memory,
        bandwidth=count * gpu.bandwidth,
        flops=count * gpu.flops,
        sum_ns=5_000 * (1 + inside) + 20_000 * between,
        # Each device sends and receives 2 (n - 1) / n of the array.
        sum_bandwidth=(150e9 if between else 200e9) * count / (2 * (count - 1)),
    )


_A100, _V100, _TWO = (
    Gpu("A100-80GB", 80 * GB, 2039e9, 312e12),
    Gpu("V100-32GB", 32 * GB, 900e9, 125e12),
    Gpu("2xV100-32GB", 64 * GB, 1800e9, 250e12),
)
GPUS: Mapping[str, Gpu] = {
    each.name: each
    for each in (
        _A100,
        Gpu("A100-40GB", 40 * GB, 1555e9, 312e12),
        _V100,
        Gpu("A10", 24 * GB, 600e9, 125e12),
        _TWO,
        _tetri(_V100, "V100-tetri"),
        _tetri(_TWO, "2xV100-tetri"),
        _tetri(_A100, "A100-tetri"),
        *(split_gpu(_A100, count) for count in (2, 4, 8, 16, 32)),
    )
}

LINKS: Mapping[str, LinkSpec] = {
    each.name: each
    for each in (
        LinkSpec("nvlink3", 0.94 * 300e9, 10_000),
        LinkSpec("nvlink2", 0.94 * 150e9, 10_000),
        LinkSpec("pcie4", 0.80 * 32e9, 15_000),
        LinkSpec("pcie3", 0.80 * 16e9, 15_000),
        LinkSpec("100gbps", 0.94 * 12.5e9, 30_000),
        LinkSpec("25gbps", 0.94 * 3.125e9, 30_000),
        LinkSpec("200gbps", 0.94 * 25e9, 20_000),
        LinkSpec("nvme", 3e9, 100_000),
        # The links that TetriInfer emulates: bytes by bandwidth alone (TI-17).
        LinkSpec("ts-roce", 25e9, 0),
        LinkSpec("ts-nvlink", 300e9, 0),
    )
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server with `count` devices of one kind.

    Fields:
        inside: Link between its devices.
        host: Link from its memory to a device.
        disk: Link from its disk to its memory.
    """

    gpu: Gpu
    count: int
    inside: LinkSpec = LINKS["nvlink3"]
    host: LinkSpec = LINKS["pcie4"]
    disk: LinkSpec = LINKS["nvme"]

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 1024:
            raise InputError("a server has 1 to 1,024 devices")


@dataclass(frozen=True, slots=True)
class ClusterHardware:
    """The servers of a cluster.

    Fields:
        net: Link of each server to all other ones.
        control_ns: Latency of a control message to or from the scheduler.
    """

    servers: tuple[ServerSpec, ...]
    net: LinkSpec = LINKS["100gbps"]
    control_ns: int = 50_000

    def __post_init__(self) -> None:
        if not 1 <= len(self.servers) <= 4096:
            raise InputError("a cluster has 1 to 4,096 servers")

    def devices(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each device and the number of its server."""
        for number, server in enumerate(self.servers):
            for place in range(server.count):
                yield f"s{number}g{place}", number

    @property
    def size(self) -> int:
        return sum(server.count for server in self.servers)


def blockllm_cluster(gpu: Gpu = GPUS["A100-80GB"]) -> ClusterHardware:
    """Return BlockLLM's cluster (section 7.1): four servers with 2, 2, 4 and 4 devices, 100 Gbps between them."""
    return ClusterHardware(tuple(ServerSpec(gpu, count) for count in (2, 2, 4, 4)))


def gpu_named(name: str) -> Gpu:
    """Return a kind of device. Raises InputError for an unknown name."""
    return _of(GPUS, name, "device")


def link_named(name: str) -> LinkSpec:
    """Return a kind of link. Raises InputError for an unknown name."""
    return _of(LINKS, name, "link")


def _of(table: Mapping[str, _Row], name: str, what: str) -> _Row:
    if name not in table:
        raise InputError(f"no {what} is called {name!r}; there are {', '.join(table)}")
    return table[name]
