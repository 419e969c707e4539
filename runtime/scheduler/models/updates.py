"""Models and versions of models that come and go while others are served (BL-30, UN-09).

    Serve -> placed -> its stages are loaded -> new sequences get it   (from one event on, all of them)
                  \\-> no room, or a device cannot load it: refused, and the version that was there goes on
    the old version, or a withdrawn model: whoever began on it finishes on it -> stages dropped, blocks that nobody else
    has forgotten

Contract: a sequence runs to its end on the version that new sequences got when it came, whatever comes later and
whatever
dies. Blocks that
two versions share stay where they are. Every ServeModel and WithdrawModel has one Updated. A ServeModel before the
first placement waits for that.
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
    def __init__(self, state: ClusterState, prefix_cache: PrefixCache) -> None:
        self._state = state
        self._prefix_cache = prefix_cache
        self._coming: dict[str, ServeModel] = {}
        self._placed: set[str] = set()

    # -- events --------------------------------------------------------------------------------------------------------

    def serve(self, event: ServeModel, now: int) -> None:
        """Begin to make a version ready; one of the same model that was on its way is given up."""
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
        """Take no new sequences for a model."""
        state = self._state
        if event.model in self._coming:
            self._give_up(event.model, now, "the model was withdrawn")
        chain = state.chains.pop(event.model, None)
        if chain is None:
            state.out.updated(event.model, "", f"model {event.model!r} is not loaded")
            return
        self._retire(chain)
        state.out.updated(event.model, "")
        state.tell.version(now, "model.withdraw", chain)

    def know(self, variants: Iterable[Variant]) -> None:
        """Variants of the chains that are there from the beginning. Raises ValueError for one of another chain."""
        names = {chain.version: chain.loaded_as for chain in self._state.chains.values()}
        for variant in variants:
            if variant.of not in names:
                raise ValueError(f"{variant.name} stands for version {variant.of[:12]}, which is not served")
            name = names[variant.of]
            self._state.variants[name] = (*self._state.variants.get(name, ()), variant)

    def first(self) -> None:
        """The chains that were there from the beginning are placed: so are their variants, those for which there is
        room.
        """
        for name, variants in tuple(self._state.variants.items()):
            exact = next((chain for chain in self._state.chains.values() if chain.loaded_as == name), None)
            self._state.variants[name] = self._placed_ones(variants, exact)

    def go_on(self, now: int) -> None:
        """What can be done for versions on their way in and out."""
        for model in tuple(self._coming):
            self._advance(model, now)
        for name in tuple(self._state.leaving):
            self._reap(name, now)

    # -- coming --------------------------------------------------------------------------------------------------------

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
        """Place it, have its stages loaded, and give it to new sequences, as far as things are."""
        state, chain = self._state, self._coming[model].chain
        if not state.placed:
            return
        if model not in self._placed:
            if (why := join(state, chain, state.chains.get(model))) is not None:
                self._give_up(model, now, why)
                return
            self._placed.add(model)
        path = state.router.path(chain, state.devices.loads)
        if path is None:
            return
        missing = state.router.missing(chain, path)
        for device, stage in missing:
            if (reason := state.devices[device].stages.refused.get(stage)) is not None:
                self._give_up(model, now, f"{chain.loaded_as} cannot be loaded: {reason}")
                return
            state.ask_for(chain, device, stage)
        if not missing:
            self._switch(model, now)

    def _switch(self, model: str, now: int) -> None:
        """From now on new sequences get it."""
        state, event = self._state, self._coming.pop(model)
        self._placed.discard(model)
        del state.coming[model]
        before = state.chains.get(model)
        state.chains[model] = event.chain
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
        """Those of some variants for which there is room; what the others brought is forgotten."""
        there: list[Variant] = []
        for variant in variants:
            if exact is None or variant.of != exact.version or join(self._state, variant.chain, exact) is not None:
                self._state.leaving[variant.chain.loaded_as] = variant.chain
            else:
                there.append(variant)
        return tuple(there)

    def _give_up(self, model: str, now: int, why: str) -> None:
        """It does not come: what it has on devices goes."""
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
        """A device cannot load a part of a variant: it serves nobody any more, and whoever has not begun on it gets
        what it named.
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
        state.waiting.remove(sequence)
        state.users[sequence.chain.loaded_as] -= 1
        sequence.chain, sequence.spec, sequence.variant = exact, exact.spec, None
        state.users[exact.loaded_as] += 1
        state.waiting.add(sequence)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _retire(self, chain: Chain) -> None:
        """No new sequence gets a chain any more, nor what stood in for it."""
        state = self._state
        for each in (chain, *(variant.chain for variant in state.variants.pop(chain.loaded_as, ()))):
            state.leaving[each.loaded_as] = each
        state.changed = True

    def _back(self, chain: Chain) -> None:
        """A version that was on its way out is wanted again."""
        self._state.leaving.pop(chain.loaded_as, None)

    def _reap(self, name: str, now: int) -> None:
        """Let go what is left of a chain, if nobody needs it. A stage that is being loaded goes when it has been."""
        state, chain = self._state, self._state.leaving[name]
        if state.users[name]:
            return
        if any(other.loaded_as == name for other in state.in_use()):
            del state.leaving[name]  # it is wanted again, or still
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
                state.out.unload_stages(device.name, loaded)
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
        if not served:
            state.used_paths.remove_version(chain.version)
        state.tell.version(now, "model.drop", chain)
