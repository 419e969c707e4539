"""Add, replace and withdraw models and versions of models during operation (BL-30, UN-09).

    ServeModel -> placed -> its stages are loaded -> new sequences get it   (from one event on, all of them)
               \\-> no room, or a device cannot load it: refused, and the former version continues
    the former version, or a withdrawn model: sequences that began on it finish on it -> its stages are unloaded, and
    blocks that no other chain has are forgotten

Contract:
- A sequence runs to its end on the version that new sequences got when it arrived, whatever is served or dies later.
- Blocks that two versions share stay where they are.
- Every ServeModel and WithdrawModel is answered by one ModelUpdated.
- A ServeModel before the first placement waits for that.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.chains import Chain, Stage, Variant
from runtime.control.scheduler_io import ServeModel, WithdrawModel
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.placement.incremental import join
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class ModelUpdates:
    """Versions of models on their way in and out."""

    def __init__(self, state: ClusterState, prefix_cache: PrefixCache) -> None:
        self._state = state
        self._prefix_cache = prefix_cache
        self._coming: dict[str, ServeModel] = {}
        self._placed: set[str] = set()

    # -- events --------------------------------------------------------------------------------------------------------

    def serve(self, event: ServeModel, now: int) -> None:
        """Start to make a version ready; an earlier one of the same model that is not ready yet is given up."""
        state, chain = self._state, event.chain
        if chain.model in self._coming:
            self._give_up(chain.model, now, "another version came before it was ready")
        if (why := self._why_not(event)) is not None:
            state.out.updated(chain.model, self._version(chain.model), why)
            state.tell.version(now, "model.refuse", chain, why)
            return
        state.block_map.learn(event.blocks)
        state.router.learn(event.profiles)
        self._coming[chain.model] = event
        state.coming[chain.model] = chain, *(variant.chain for variant in event.variants)
        state.changed = True

    def withdraw(self, event: WithdrawModel, now: int) -> None:
        """Stop a model for new sequences."""
        state = self._state
        if event.model in self._coming:
            self._give_up(event.model, now, "the model was withdrawn")
        chain = state.chains.pop(event.model, None)
        if chain is None:
            state.out.updated(event.model, "", f"model {event.model!r} is not loaded")
            return
        self._retire(chain)
        state.prompts.chains_changed()
        state.out.updated(event.model, "")
        state.tell.version(now, "model.withdraw", chain)

    def know(self, variants: Iterable[Variant]) -> None:
        """Add variants of the chains served from the start. Raises ValueError for one of another chain."""
        names = {chain.version: chain.loaded_as for chain in self._state.chains.values()}
        for variant in variants:
            if variant.of not in names:
                raise ValueError(f"{variant.name} stands for version {variant.of[:12]}, which is not served")
            name = names[variant.of]
            self._state.variants[name] = (*self._state.variants.get(name, ()), variant)

    def first(self) -> None:
        """Place the variants of the chains served from the start, as room allows; called after the first placement."""
        for name, variants in tuple(self._state.variants.items()):
            exact = next((chain for chain in self._state.chains.values() if chain.loaded_as == name), None)
            self._state.variants[name] = self._placed_ones(variants, exact)

    def go_on(self, now: int) -> None:
        """Continue with all versions on their way in and out, as far as possible now."""
        for model in tuple(self._coming):
            self._advance(model, now)
        for name in tuple(self._state.leaving):
            self._reap(name, now)

    # -- versions on their way in --------------------------------------------------------------------------------------

    def _why_not(self, event: ServeModel) -> str | None:
        state, chain = self._state, event.chain
        known = {block.id for block in event.blocks}
        for each in (chain, *(variant.chain for variant in event.variants)):
            if not each.uses:
                return f"{each.loaded_as} has no blocks"
            if lacking := [
                use.block for use in each.uses if use.block not in known and not state.block_map.knows(use.block)
            ]:
                return f"block {lacking[0][:12]} of {each.loaded_as} is not described"
            for other in (*state.in_use(), *state.leaving.values()):
                if other.loaded_as == each.loaded_as and other.version != each.version:
                    return (
                        f"devices know another version as {each.loaded_as}: two that may meet need names of their own"
                    )
        return None

    def _advance(self, model: str, now: int) -> None:
        """Place a version, load its stages and switch new sequences to it, as far as possible now."""
        state, chain = self._state, self._coming[model].chain
        if not state.placed:
            return
        if model not in self._placed:
            if (why := join(state, chain, state.chains.get(model))) is not None:
                self._give_up(model, now, why)
                return
            self._placed.add(model)
        paths = state.router.first_paths(chain, state.devices.loads)
        if None in paths:
            return
        missing = [each for path in paths for each in state.router.missing(chain, path or ())]
        loading = True
        for device, stage in missing:
            if (reason := state.devices[device].stages.refused.get(stage)) is not None:
                self._give_up(model, now, f"{chain.loaded_as} cannot be loaded: {reason}")
                return
            loading &= state.ask_for(chain, device, stage)
        if not missing or not loading:  # where it does not fit now, its requests make room
            self._switch(model, now)

    def _switch(self, model: str, now: int) -> None:
        """Give new sequences a version that is ready."""
        state, event = self._state, self._coming.pop(model)
        self._placed.discard(model)
        del state.coming[model]
        before = state.chains.get(model)
        state.chains[model] = event.chain
        state.prompts.chains_changed()
        if before is not None and before.loaded_as != event.chain.loaded_as:
            self._retire(before)
        self._back(event.chain)
        for variant in self._replace_variants(event):
            self._back(variant.chain)
        state.out.updated(model, event.chain.version)
        state.tell.version(now, "model.serve", event.chain)

    def _replace_variants(self, event: ServeModel) -> tuple[Variant, ...]:
        state, name = self._state, event.chain.loaded_as
        kept = {variant.chain.loaded_as for variant in event.variants}
        for variant in state.variants.pop(name, ()):
            if variant.chain.loaded_as not in kept:
                state.leaving[variant.chain.loaded_as] = variant.chain
        found = self._placed_ones(event.variants, event.chain)
        if found:
            state.variants[name] = found
        return found

    def _placed_ones(self, variants: tuple[Variant, ...], exact: Chain | None) -> tuple[Variant, ...]:
        """Place variants; return those for which there is room, and mark the rest as leaving."""
        there: list[Variant] = []
        for variant in variants:
            if exact is None or variant.of != exact.version or join(self._state, variant.chain, exact) is not None:
                self._state.leaving[variant.chain.loaded_as] = variant.chain
            else:
                there.append(variant)
        return tuple(there)

    def _give_up(self, model: str, now: int, why: str) -> None:
        """Answer a version with an error, and mark what it has on devices as leaving."""
        state, event = self._state, self._coming.pop(model)
        self._placed.discard(model)
        del state.coming[model]
        for chain in (event.chain, *(variant.chain for variant in event.variants)):
            state.leaving[chain.loaded_as] = chain
        state.out.updated(model, self._version(model), why)
        state.tell.version(now, "model.refuse", event.chain, why)
        state.changed = True

    def _version(self, model: str) -> str:
        chain = self._state.chains.get(model)
        return "" if chain is None else chain.version

    def refused(self, stage: Stage) -> None:
        """Withdraw the variant with a stage that a device cannot load.

        Sequences that wait for it and have no output yet get the chain that they named.
        """
        for name, variants in tuple(self._state.variants.items()):
            broken = next((variant for variant in variants if variant.chain.loaded_as == stage.model), None)
            if broken is None:
                continue
            self._state.variants[name] = tuple(variant for variant in variants if variant is not broken)
            self._state.leaving[stage.model] = broken.chain
            self._state.changed = True
            exact = next((chain for chain in self._state.in_use() if chain.loaded_as == name), None)
            if exact is not None:
                for sequence in [m for m in self._state.waiting if m.variant is broken and not m.output]:
                    self._rebase(sequence, exact)

    def _rebase(self, sequence: ScheduledSequence, exact: Chain) -> None:
        state = self._state
        state.swapping.drop_copy(sequence)
        state.waiting.remove(sequence)
        state.users[sequence.chain.loaded_as] -= 1
        sequence.chain, sequence.spec, sequence.variant = exact, exact.spec, None
        state.users[exact.loaded_as] += 1
        state.waiting.add(sequence)

    # -- versions on their way out -------------------------------------------------------------------------------------

    def _retire(self, chain: Chain) -> None:
        """Mark a chain and its variants as leaving: no new sequence gets them."""
        state = self._state
        for each in (chain, *(variant.chain for variant in state.variants.pop(chain.loaded_as, ()))):
            state.leaving[each.loaded_as] = each
        state.changed = True

    def _back(self, chain: Chain) -> None:
        """Undo the leaving of a chain that is served again."""
        self._state.leaving.pop(chain.loaded_as, None)

    def _reap(self, name: str, now: int) -> None:
        """Remove what is left of a chain once no sequence uses it; waits for stages that are being loaded."""
        state, chain = self._state, self._state.leaving[name]
        if state.users[name]:
            return
        if any(other.loaded_as == name for other in state.in_use()):
            del state.leaving[name]  # it is served again, or still
            return
        self._prefix_cache.remove_version(chain.version)
        waits = False
        for device in state.devices:
            stages = device.stages
            mine = [stage for stage in stages.wanted if stage.model == name]
            waits |= any(stage in stages.loading for stage in mine)
            gone = [stage for stage in mine if stage not in stages.loading]
            loaded = [stage for stage in gone if stages.loaded.pop(stage, None) is not None]
            for stage in gone:
                del stages.wanted[stage]
            for refused in [each for each in stages.refusals if each.model == name]:
                stages.pardon(refused)
            if loaded:
                stages.cool()
                state.unload(device.name, loaded)
        if waits:
            return
        del state.leaving[name]
        state.users.pop(name, None)
        kept = [*state.in_use(), *state.leaving.values()]
        forgotten, served = (
            state.block_map.remove_chain(chain, kept),
            any(other.version == chain.version for other in kept),
        )
        state.router.remove_blocks(forgotten, "" if served else chain.version)
        state.times.loads.remove_blocks(forgotten)
        if not served:
            state.used_paths.remove_version(chain.version)
        state.tell.version(now, "model.drop", chain)
