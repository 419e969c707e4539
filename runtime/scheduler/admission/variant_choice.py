"""Choose the chain of a new sequence: the one that its request names, or one of its variants (BL-20, BL-28, BL-29).

    adaptive request -> options: the chain itself, its variants, its nearest low-rank delta that is served
        -> `policy.routing.variants` (latency or accuracy first, limits) -> a chain, for the life of the sequence

The latency of an option is that of the batches that wait for the devices of its path, and then of the batch that the
request would join. As load grows, the latencies of all options grow. With accuracy first, a latency limit is what makes
a lower score acceptable.

- Latencies are those of the request's prompt, from profiles, if all blocks of all options have one. Otherwise they
  follow from the bytes of the blocks, which ranks chains but measures nothing.
- If paths are chosen by bytes read (`policy.routing.bytes_read`), an option without profiles counts the bytes that
  steps read with the new sequence. Chains that are loaded then go before those that are not.
- Without profiles, and with latency first, a variant with all of its blocks on devices goes before a chain that needs a
  load (BL-13: an instance, an equivalent one, a new one). With profiles loads count as seconds.
- With profiles, a path's hops and loading what is not resident on its devices count as they were measured.
- With a low-rank delta among the options, latencies are those of one step (BL-21), because the rows of a delta join the
  batch of its base. The queue is the batches of the other options, and the request joins the option's own batch.
- With profiles of the chain and its delta, variants without one are left out. Otherwise the delta counts the bytes that
  it adds to its base, so it is taken wherever it is served.

A request that is not adaptive always gets its own chain. Each choice is traced with all terms. This module changes no
state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain as joined
from itertools import pairwise

from runtime.chains import Chain, Path, Variant
from runtime.control.request_checks import refusal
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line
from runtime.policy.routing.latency import Candidate, RowWork
from runtime.policy.routing.variants import Dispatch, DispatchLimits, Kind, Option, dispatch
from runtime.scheduler.routing.estimates import LatencyEstimates, work_of
from runtime.scheduler.state import ClusterState
from runtime.types import ModelSpec, SequenceRequest

#: The batches of the other options in a step, and the rows of an option's own batch.
Batches = tuple[tuple[RowWork, ...], int]

#: Without profiles: bytes that a step reads per second, and additional rows that double the time of a step.
_NOMINAL_BYTES = 20e9
_NOMINAL_ROWS = 64.0


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """The variants of the served chains, and how one is chosen.

    Fields:
        variants: Variants that adaptive requests may get.
        limits: Whether latency or accuracy comes first, the least scores, and the latency limit of accuracy.
        profiles: Profiles of blocks, by the ids in chains, and of whole chains, by their versions; None for none. Paths
            are chosen by them too (`scheduler.routing.estimates`).
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
        """Return the variant that a request gets; None for the chain that it names, as when it has produced tokens."""
        if not (request.adaptive and self._state.placed) or request.output:
            return None
        own = Variant(exact.model, exact, exact.version, 1.0)
        deltas, others = self._nearest_delta(exact), self._state.variants.get(exact.loaded_as, ())
        if deltas and all(map(self._measured, (own, *deltas))):
            others = tuple(filter(self._measured, others))
        known = (own, *others, *deltas)
        if len(known) == 1:
            return None
        chains = [each.chain for each in known]
        batches = self._step_batches(chains, len(request.prompt)) if deltas else [None] * len(chains)
        options = [
            self._option(request, each, "own" if each is own else each.kind, profile, beside)
            for each, profile, beside in zip(known, self._chain_profiles(known), batches, strict=True)
        ]
        if not all(map(self._measured, known)):
            options = self._warm(known, options)
        as_prompt = not deltas and all(map(self._measured, known))
        work = work_of(len(request.prompt)) if as_prompt else RowWork(1, len(request.prompt))
        found = dispatch(options, work, request.adaptive, self._limits)
        if not isinstance(found, Dispatch):
            return None
        at = options.index(found.chosen)
        self._state.tell.dispatched(now, request, found)
        return None if at == 0 else known[at]

    # -- options -------------------------------------------------------------------------------------------------------

    def _nearest_delta(self, exact: Chain) -> tuple[Variant, ...]:
        """Return the low-rank delta of a chain with the best score of those that are served, if any is."""
        deltas = [
            Variant(chain.model, chain, exact.version, chain.rewriting.score, "delta")
            for chain in self._state.chains.values()
            if chain.rewriting is not None and chain.rewriting.of == exact.model
            if chain.spec.vocab_size == exact.spec.vocab_size and not chain.spec.virtual_tokens
        ]
        return (max(deltas, key=lambda delta: delta.score),) if deltas else ()

    def _option(
        self, request: SequenceRequest, variant: Variant, kind: Kind, profile: BlockProfile, beside: Batches | None
    ) -> Option:
        """Return a variant on its cheapest path as an option; without room if no path can run the request.

        Args:
            beside: The batches of a step with the variant; None to weigh what waits for the devices of its path.
        """
        chain, score = variant.chain, variant.score
        path = self._state.router.path(chain, self._state.devices.loads)
        if path is None or not self._able(request, chain, path):
            return Option(Candidate(variant.name, profile), kind, score, room=False)
        if beside is not None:
            return Option(Candidate(variant.name, profile, *beside), kind, score)
        context = len(request.prompt)
        if self._by_reading(chain):
            seconds = self._state.router.reading(chain, path, context) / _NOMINAL_BYTES
            whole = BlockProfile(
                chain.loaded_as, profile.nbytes, Grid((1.0,), (0.0,), ((seconds,),)), profile.prefill, 0.0
            )
            return Option(Candidate(variant.name, whole), kind, score)
        queue = tuple(RowWork(rows, context) for rows in self._batches(path))
        joins = max(self._state.devices[hop.device].passing.count for hop in path)
        transfer, swap = self._ways(chain, path, context) if self._measured(variant) else (0.0, 0.0)
        return Option(
            Candidate(variant.name, profile, queue, joins, transfer, swap, not joins, self._state.config.prefill_chunk),
            kind,
            score,
        )

    def _ways(self, chain: Chain, path: Path, context: int) -> tuple[float, float]:
        """Return the seconds of a path's hops for a prompt, and of the loads that it lacks (T_transfer, T_swap)."""
        state, times = self._state, self._state.times
        servers = [state.devices[hop.device].facts.server for hop in path]
        nbytes = context * max(use.input_bytes for use in chain.uses)
        transfer = sum(times.hop_seconds(one == other, nbytes, True) for one, other in pairwise(servers))
        swaps: dict[str, float] = {}
        for device, sizes, own in self._lacks(chain, path):
            swaps[device] = swaps.get(device, 0.0) + times.loads.seconds(device, sizes, own)
        return transfer, max(swaps.values(), default=0.0)

    def _by_reading(self, chain: Chain) -> bool:
        """Return whether the paths of a chain are chosen by bytes read, and not by profiles."""
        return self._state.config.routing == "least-bytes" and not self._estimates.covers(chain)

    def _warm(self, known: Sequence[Variant], options: list[Option]) -> list[Option]:
        """Leave room only to chains that need no load, if there are any; `known` begins with the chain itself.

        If the chain itself needs none, all keep their room, unless the paths of all are chosen by bytes read.
        """
        by_reading = all(self._by_reading(each.chain) for each in known)
        if not by_reading and self._limits.prefer != "latency":
            return options
        there = [option.room and self._is_there(each.chain) for each, option in zip(known, options, strict=True)]
        if not any(there) or (there[0] and not by_reading):
            return options
        return [replace(option, room=option.room and is_there) for option, is_there in zip(options, there, strict=True)]

    def _is_there(self, chain: Chain) -> bool:
        """Return whether nothing has to be loaded for the cheapest path of a chain."""
        path = self._state.router.path(chain, self._state.devices.loads)
        return path is not None and not any(self._lacks(chain, path))

    def _lacks(self, chain: Chain, path: Path) -> Iterator[tuple[str, Mapping[str, int], int]]:
        """Yield (device, bytes of missing blocks, bytes of adapters) of each stage of a path that has to be loaded.

        A stage that is not loaded lacks nothing if other stages of its device have all of its blocks.
        """
        for device, stage in self._state.router.missing(chain, path):
            weights, there = self._state.weights_of(chain, stage), self._state.warm_sizes(device)
            sizes = {block: size for block, size in weights.blocks.items() if block not in there}
            if sizes or weights.own:
                yield device, sizes, weights.own

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

    def _step_batches(self, chains: Sequence[Chain], context: int) -> list[Batches]:
        """Return for each chain the batches of the other chains in a step, and the rows of its own batch."""
        rows: Counter[str] = Counter()
        for alive in {each.loaded_as: each for each in self._state.in_use()}.values():
            rows[_batch_of(alive.spec)] += self._state.users[alive.loaded_as]
        own = [_batch_of(chain.spec) for chain in chains]
        work = {batch: RowWork(rows[batch], context) for batch in own if rows[batch]}
        return [(tuple(work[other] for other in work if other != batch), rows[batch]) for batch in own]

    # -- profiles ------------------------------------------------------------------------------------------------------

    def _chain_profiles(self, variants: Sequence[Variant]) -> list[BlockProfile]:
        """Return the measured profiles if all variants have one, else nominal ones for all."""
        found = [self._estimates.whole(each.chain) for each in variants]
        measured = [each for each in found if each is not None]
        return measured if len(measured) == len(found) else [self._nominal(each) for each in variants]

    def _measured(self, variant: Variant) -> bool:
        """Return whether a variant has a measured profile."""
        return self._estimates.whole(variant.chain) is not None

    def _nominal(self, variant: Variant) -> BlockProfile:
        """Return a profile that follows from the bytes of a chain's blocks, or from those that a delta adds."""
        chain = variant.chain
        if variant.kind == "delta":
            nbytes = sum(use.adapter_bytes for use in chain.uses)
        else:
            nbytes = sum(self._state.block_map.block(use.block).nbytes for use in chain.uses)
        seconds = nbytes / _NOMINAL_BYTES
        grid = Grid((1.0, 1.0 + _NOMINAL_ROWS), (0.0,), ((seconds,), (2 * seconds,)))
        return BlockProfile(chain.loaded_as, nbytes, grid, Line((1.0,), (seconds,)), 0.0)


def _batch_of(spec: ModelSpec) -> str:
    """Return the model in whose batch the rows of a model run: its base, unless it has weights of its own."""
    return spec.name if spec.base is None or spec.kind in ("foundation", "full") else spec.base
