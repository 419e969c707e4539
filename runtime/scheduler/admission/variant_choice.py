"""Choose the chain of a new sequence: the one that its request names, or one of its variants (BL-20, BL-28, BL-29).

    adaptive request -> options: the chain itself, its variants -> `policy.routing.variants` (latency or accuracy
    first, limits) -> a chain, for the life of the sequence

The latency of an option is that of the batches that wait for the devices of its path, and then of the batch that the
request would join. As load grows, the latencies of all options grow. With accuracy first, a latency limit is what makes
a lower score acceptable.

- Latencies follow from profiles if all blocks of all options have one. Otherwise they follow from the bytes of the
  blocks, which ranks chains but measures nothing.
- If paths are chosen by bytes read (`policy.routing.bytes_read`), an option without profiles counts the bytes that
  steps read with the new sequence. Chains that are loaded then go before those that are not (BL-13: an instance, an
  equivalent one, a new one).

A request that is not adaptive always gets its own chain. Each choice is traced with all terms. This module changes no
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain as joined

from runtime.chains import Chain, Path, Variant
from runtime.control.request_checks import refusal
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line
from runtime.policy.routing.latency import Candidate, RowWork
from runtime.policy.routing.variants import Dispatch, DispatchLimits, Kind, Option, dispatch
from runtime.scheduler.routing.estimates import LatencyEstimates
from runtime.scheduler.state import ClusterState
from runtime.types import SequenceRequest

#: Without profiles: bytes that a step reads per second, and additional rows that double the time of a step.
_NOMINAL_BYTES = 20e9
_NOMINAL_ROWS = 64.0


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """The variants of the served chains, and how one is chosen.

    Fields:
        variants: Variants that adaptive requests may get.
        limits: Whether latency or accuracy comes first, the least scores, and the latency limit of accuracy.
        profiles: Profiles of blocks, by the ids in chains; None for none. Paths are chosen by them too
            (`scheduler.routing.estimates`).
    """

    variants: tuple[Variant, ...] = ()
    limits: DispatchLimits = field(default_factory=DispatchLimits)
    profiles: DeviceProfile | None = None


class VariantChooser:
    """Choose variants for adaptive requests."""

    def __init__(self, state: ClusterState, limits: DispatchLimits, estimates: LatencyEstimates) -> None:
        self._state = state
        self._limits = limits
        self._estimates = estimates

    def choose(self, request: SequenceRequest, exact: Chain, now: int) -> Variant | None:
        """Return the variant that a request gets; None for the chain that it names."""
        variants = self._state.variants.get(exact.loaded_as, ()) if request.adaptive and self._state.placed else ()
        if not variants:
            return None
        profiles = self._chain_profiles([exact, *(variant.chain for variant in variants)])
        options = [self._option(request, exact, profiles[0], "own", 1.0)]
        for variant, profile in zip(variants, profiles[1:], strict=True):
            options.append(self._option(request, variant.chain, profile, variant.kind, variant.score))
        options = self._warm([exact, *(variant.chain for variant in variants)], options)
        found = dispatch(options, RowWork(1, len(request.prompt)), request.adaptive, self._limits)
        if not isinstance(found, Dispatch):
            return None
        at = options.index(found.chosen)
        self._state.tell.dispatched(now, request, found)
        return None if at == 0 else variants[at - 1]

    # -- options -------------------------------------------------------------------------------------------------------

    def _option(
        self, request: SequenceRequest, chain: Chain, profile: BlockProfile, kind: Kind, score: float
    ) -> Option:
        """Return a chain on its cheapest path as an option; without room if no path can run the request."""
        path = self._state.router.path(chain, self._state.devices.loads)
        if path is None or not self._able(request, chain, path):
            return Option(Candidate(chain.loaded_as, profile), kind, score, room=False)
        context = len(request.prompt)
        if self._by_reading(chain):
            seconds = self._state.router.reading(chain, path, context) / _NOMINAL_BYTES
            whole = BlockProfile(
                chain.loaded_as, profile.nbytes, Grid((1.0,), (0.0,), ((seconds,),)), profile.prefill, 0.0
            )
            return Option(Candidate(chain.loaded_as, whole), kind, score)
        queue = tuple(RowWork(rows, context) for rows in self._batches(path))
        joins = max(self._state.devices[hop.device].passing.count for hop in path)
        return Option(Candidate(chain.loaded_as, profile, queue, joins), kind, score)

    def _by_reading(self, chain: Chain) -> bool:
        """Return whether the paths of a chain are chosen by bytes read, and not by profiles."""
        return self._state.config.routing == "least-bytes" and not self._estimates.covers(chain)

    def _warm(self, chains: Sequence[Chain], options: list[Option]) -> list[Option]:
        """Leave room to loaded chains only, if there are any, and if the paths of all are chosen by bytes read."""
        router, loads = self._state.router, self._state.devices.loads
        if not all(self._by_reading(chain) for chain in chains):
            return options
        paths = [
            router.path(chain, loads) if option.room else None for chain, option in zip(chains, options, strict=True)
        ]
        warm = [path is not None and not router.missing(chain, path) for chain, path in zip(chains, paths, strict=True)]
        if not any(warm):
            return options
        return [replace(option, room=option.room and there) for option, there in zip(options, warm, strict=True)]

    def _able(self, request: SequenceRequest, chain: Chain, path: Path) -> bool:
        """Return whether a chain can run a request: it takes it, and no device has refused a stage of the path."""
        if refusal(request, chain.spec) is not None or self._state.block_map.why_not(chain) is not None:
            return False
        missing = self._state.router.missing(chain, path)
        return all(stage not in self._state.devices[device].stages.refused for device, stage in missing)

    def _batches(self, path: Path) -> Iterable[int]:
        """Return the rows of each batch that waits for the devices of a path."""
        devices, instances = {hop.device for hop in path}, self._state.block_map.instances
        counts = self._state.waiting.by_chain()
        waiting = 0
        for head in self._state.waiting.heads():
            theirs = set(joined.from_iterable(instances.get(use.block, ()) for use in head.chain.uses))
            waiting += counts[head.chain.version] if theirs & devices else 0
        full, rest = divmod(waiting, self._state.config.max_num_seqs)
        return [self._state.config.max_num_seqs] * full + [rest] * (rest > 0)

    # -- profiles ------------------------------------------------------------------------------------------------------

    def _chain_profiles(self, chains: Sequence[Chain]) -> list[BlockProfile]:
        """Return the measured profiles if all chains are covered, else nominal ones for all."""
        if all(self._estimates.covers(each) for each in chains):
            return [self._estimates.whole(each) for each in chains]
        return [self._nominal(each) for each in chains]

    def _nominal(self, chain: Chain) -> BlockProfile:
        """Return a profile that follows from the bytes of a chain's blocks."""
        nbytes = sum(self._state.block_map.block(use.block).nbytes for use in chain.uses)
        seconds = nbytes / _NOMINAL_BYTES
        grid = Grid((1.0, 1.0 + _NOMINAL_ROWS), (0.0,), ((seconds,), (2 * seconds,)))
        return BlockProfile(chain.loaded_as, nbytes, grid, Line((1.0,), (seconds,)), 0.0)
