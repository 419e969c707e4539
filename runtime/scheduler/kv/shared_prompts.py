"""Share the first layers of equal prompts between chains that have these layers in common (UN-15).

    donor    runs its prompt; the hidden states at its boundaries are saved in host memory, one array per page set
    sharer   has the donor's pages of the layers before the boundary; its prompt enters behind them, with those states

Equal domains and equal tokens have equal pages and hidden states, so a sharer's tokens are its own model's. Boundaries
are where served chains part (`policy.kv.boundaries`). States are keyed by domain, tenant and all tokens up to the end
of their page set.

Contract:
- The scheduler alone decides what is saved and dropped. All states together, those on their way included, take at most
  `shared_prompt_bytes`; the least recently used leave first. 0: nothing is saved or shared.
- States are kept while a running sequence or cached prefix has the pages of the same tokens: without them they are of
  no use.
- A sequence waits for states that a running one is about to save, if that is worth it and the other one is not paused.
- Only on clusters of one device, with an engine that lets rows enter inside a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from runtime.chains import Boundary, Chain, Hop, Path
from runtime.config import ClusterConfig
from runtime.control.counters import Counters
from runtime.messages import DropStates, PromptEntry, PromptSave
from runtime.policy.kv.boundaries import parting_boundaries, worth_waiting
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.kv.prefix_index import CachedPrefix, PrefixIndex, PrefixMatch
from runtime.scheduler.outbox import CommandOutbox
from runtime.scheduler.sequences.parts import FREE
from runtime.scheduler.sequences.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class _StatePart:
    """The states of one page set at one boundary: number of the page set, bytes, domain and tenant."""

    at: int
    nbytes: int
    realm: tuple[str, str]


@dataclass(slots=True)
class _Saving:
    """What a running sequence is still to save, by key."""

    device: str
    keys: dict[bytes, _StatePart] = field(default_factory=dict)


class SharedPrompts:
    """The saved hidden states, and the pages that belong to them.

    Args:
        chains: The version of each model that new sequences get.
    """

    def __init__(
        self,
        config: ClusterConfig,
        chains: Mapping[str, Chain],
        devices: Devices,
        out: CommandOutbox,
        counters: Counters,
    ) -> None:
        on = config.devices == 1 and config.prefix_caching != "off"
        self._limit = config.shared_prompt_bytes if on else 0
        self._chains, self._devices, self._out, self._counters = chains, devices, out, counters
        self._parting: Mapping[str, tuple[Boundary, ...]] | None = None
        self._index = PrefixIndex()
        #: Entries of a sequence or cached prefix in the index, one per boundary at which its pages are cut.
        self._donors: dict[CachedPrefix, list[CachedPrefix]] = {}
        self._owners: dict[CachedPrefix, CachedPrefix] = {}
        self._states: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # device and bytes, least recently used first
        self._saving: dict[str, _Saving] = {}
        self._awaited: dict[bytes, set[str]] = {}  # sequences that are to save a key
        self._waits = False  # whether a sequence has not been admitted because it waits for states
        self.nbytes = 0
        self._reserved = 0

    def chains_changed(self) -> None:
        """Record that other chains are served now."""
        self._parting = None

    def boundaries(self, chain: Chain, path: Path) -> tuple[Boundary, ...]:
        """Return the boundaries of a chain at which prompts are shared on this path."""
        if not self._limit or not chain.boundaries or len(path) != 1 or not self._devices[path[0].device].enters:
            return ()
        if self._parting is None:
            self._parting = parting_boundaries(self._chains.values())
        return self._parting.get(chain.version, ())

    # -- sequences that share ------------------------------------------------------------------------------------------

    def matches(self, sequence: ScheduledSequence, path: Path) -> list[PrefixMatch]:
        """Return what a new sequence may share with other chains, at each boundary as much as possible."""
        chain, width = sequence.chain, sequence.chain.spec.page_tokens
        most = min(sequence.tokens - 1, len(sequence.request.prompt)) // width
        found: list[PrefixMatch] = []
        for boundary in reversed(self.boundaries(chain, path)) if most else ():
            realm, marks = _realm(boundary, width, sequence.request.tenant), sequence.mark()
            salt = _salt(realm)
            for each in self._index.matches(realm, marks, most):
                groups = 0
                while groups < each.groups and salt + marks[groups] in self._states:
                    groups += 1
                if groups:
                    found.append(PrefixMatch(self._owners[each.prefix], groups, boundary, path))
        return found

    def waits(
        self, sequence: ScheduledSequence, path: Path, best: int, running: Mapping[str, ScheduledSequence]
    ) -> bool:
        """Return whether a new sequence should wait for states that a running one, not paused, is about to save.

        Args:
            best: Pages that it can share already.
            running: The running sequences.
        """
        if not self._awaited:
            return False
        width, layers = sequence.chain.spec.page_tokens, sequence.chain.spec.kv_layers
        most, soon = min(sequence.tokens - 1, len(sequence.request.prompt)) // width, 0
        for boundary in self.boundaries(sequence.chain, path) if most else ():
            salt, groups = _salt(_realm(boundary, width, sequence.request.tenant)), 0
            for mark in sequence.mark()[:most]:
                key = salt + mark
                if key not in self._states and not any(
                    running[seq].waits is FREE for seq in self._awaited.get(key, ())
                ):
                    break
                groups += 1
            soon = max(soon, groups * boundary.layers)
        worth = worth_waiting(best, soon, most * layers)
        self._waits |= worth
        return worth

    def enter(self, sequence: ScheduledSequence, match: PrefixMatch, boundary: Boundary) -> PromptEntry:
        """Return how a sequence starts from a match at a boundary."""
        width = sequence.chain.spec.page_tokens
        salt = _salt(_realm(boundary, width, sequence.request.tenant))
        keys = tuple(salt + mark for mark in sequence.mark()[: match.groups])
        for key in keys:
            self._states.move_to_end(key)
        self._counters.shared_prompts += 1
        self._counters.shared_prompt_tokens += match.groups * width
        return PromptEntry(match.prefix.name, match.groups * width, boundary.layers, boundary.at, keys)

    # -- sequences that save -------------------------------------------------------------------------------------------

    def saves(self, sequence: ScheduledSequence, entry: PromptEntry | None = None) -> tuple[PromptSave, ...]:
        """Return what a sequence that has just got its pages is to save while its prompt runs.

        Page sets that it shares are left out, and those that are saved already. Without room nothing is saved.
        """
        holding, width = sequence.pages.holding, sequence.chain.spec.page_tokens
        boundaries = self.boundaries(sequence.chain, sequence.path) if holding.bounds else ()
        groups = len(sequence.request.prompt) // width
        made: list[PromptSave] = []
        saving = _Saving(sequence.path[0].device)
        for boundary in boundaries:
            if boundary.layers not in holding.bounds:
                continue
            behind = entry is not None and boundary.at <= entry.at
            first = entry.tokens // width if behind and entry is not None else sequence.computed // width
            realm = _realm(boundary, width, sequence.request.tenant)
            salt, nbytes = _salt(realm), width * boundary.nbytes
            keys = [salt + mark for mark in sequence.mark()[first:groups]]
            wanted = {
                key: _StatePart(at, nbytes, realm) for at, key in enumerate(keys, first) if key not in self._states
            }
            if wanted and self._reserve(nbytes * len(wanted)):
                saving.keys |= wanted
                made.append(PromptSave(boundary.at, (*[b""] * first, *(key if key in wanted else b"" for key in keys))))
        if made:
            self._saving[sequence.seq] = saving
            for key in saving.keys:
                self._awaited.setdefault(key, set()).add(sequence.seq)
        return tuple(made)

    def show(self, owner: CachedPrefix, chain: Chain, groups: int) -> bool:
        """Record that a sequence or cached prefix has the pages of its first `groups` page sets, all of its prompt.

        Returns whether a sequence waits for states, and some were saved.
        """
        if not owner.holding.bounds or not groups:
            return False
        donor = self._donors.get(owner)
        if donor is None:
            donor = self._donors[owner] = self._entries(owner, chain)
        for entry in donor:
            if entry.known < groups:
                self._index.reaches(entry, groups)
        saving = self._saving.get(owner.name)
        if saving is None or not saving.keys:
            return False
        realms = {entry.shelf.realm for entry in donor}
        ready = [key for key, part in saving.keys.items() if part.at < groups]
        for key in ready:
            self._saved(owner.name, saving, key, realms)
        woken, self._waits = self._waits and bool(ready), self._waits and not ready
        return woken

    def hide(self, name: str, owner: CachedPrefix | None) -> None:
        """Forget a sequence or cached prefix that leaves its pages, and the states that are of no use without them."""
        saving = self._saving.pop(name, None)
        if saving is not None:
            unsaved = [key for key in saving.keys if self._unawaited(name, saving, key)]
            self._send_drop(saving.device, [key for key in unsaved if key not in self._states])
        for entry in self._donors.pop(owner, ()) if owner is not None else ():
            del self._owners[entry]
            realm, marks = entry.shelf.realm, entry.marks[: entry.known]
            self._index.remove_prefix(entry)
            salt = _salt(realm)
            gone = [salt + mark for mark in marks if next(self._index.having(realm, mark), None) is None]
            self._drop_states(gone)

    # -- views ---------------------------------------------------------------------------------------------------------

    def check(self, owners: Iterable[CachedPrefix]) -> None:
        """Raise RuntimeError unless the states fit their limit and each belongs to pages of one of these owners."""
        if (
            self.nbytes != sum(nbytes for _, nbytes in self._states.values())
            or self.nbytes + self._reserved > self._limit
        ):
            raise RuntimeError("saved states are counted wrongly, or exceed their limit")
        if self._reserved != sum(part.nbytes for each in self._saving.values() for part in each.keys.values()):
            raise RuntimeError("states that are to be saved are counted wrongly")
        if not set(self._donors) <= set(owners):
            raise RuntimeError("a donor of prompts has gone")
        entries = [entry for donor in self._donors.values() for entry in donor]
        self._index.check(entries)
        held = {_salt(entry.shelf.realm) + mark for entry in entries for mark in entry.marks[: entry.known]}
        if not held.issuperset(self._states):
            raise RuntimeError("states are saved that belong to no pages")

    # -- internals -----------------------------------------------------------------------------------------------------

    def _entries(self, owner: CachedPrefix, chain: Chain) -> list[CachedPrefix]:
        device, tenant = owner.path[0].device, owner.shelf.realm[1]
        entries: list[CachedPrefix] = []
        for boundary in self.boundaries(chain, owner.path):
            if boundary.layers in owner.holding.bounds:
                path = (Hop(device, 0, boundary.at, (0, boundary.layers)),)
                shelf = self._index.shelf(_realm(boundary, chain.spec.page_tokens, tenant), path)
                entry = CachedPrefix(owner.name, owner.holding, owner.marks, shelf)
                self._owners[entry] = owner
                entries.append(entry)
        return entries

    def _saved(self, seq: str, saving: _Saving, key: bytes, realms: Collection[tuple[str, str]]) -> None:
        """Record that a state is on the device; drop it if the pages are not shared there any more."""
        part, alone = saving.keys[key], self._unawaited(seq, saving, key)
        del saving.keys[key]
        if key in self._states:
            return
        if part.realm in realms:
            self._states[key] = saving.device, part.nbytes
            self.nbytes += part.nbytes
            self._counters.saved_state_bytes += part.nbytes
        elif alone:
            self._send_drop(saving.device, [key])

    def _unawaited(self, seq: str, saving: _Saving, key: bytes) -> bool:
        """Release a key's reservation; return whether no other sequence is to save it."""
        self._reserved -= saving.keys[key].nbytes
        self._awaited[key].discard(seq)
        if not self._awaited[key]:
            del self._awaited[key]
        return key not in self._awaited

    def _reserve(self, nbytes: int) -> bool:
        """Reserve room for states, for which the least recently used ones leave; return False if there is none."""
        if self._reserved + nbytes > self._limit:
            return False
        gone: list[bytes] = []
        free = self._limit - self.nbytes - self._reserved
        for key, (_, size) in self._states.items():
            if free >= nbytes:
                break
            gone.append(key)
            free += size
        self._drop_states(gone)
        self._reserved += nbytes
        return True

    def _drop_states(self, keys: Iterable[bytes]) -> None:
        """Drop saved states; keys without one are ignored.

        A state that another sequence is about to save stays on the device, in the room reserved for that.
        """
        by_device: dict[str, list[bytes]] = {}
        for key in keys:
            if (known := self._states.pop(key, None)) is not None:
                self.nbytes -= known[1]
                self._counters.dropped_state_bytes += known[1]
                if key not in self._awaited:
                    by_device.setdefault(known[0], []).append(key)
        for device, some in by_device.items():
            self._send_drop(device, some)

    def _send_drop(self, device: str, keys: list[bytes]) -> None:
        if keys and self._devices.alive(device):
            self._out.add_message(device, DropStates(tuple(keys)))


def _realm(boundary: Boundary, page_tokens: int, tenant: str) -> tuple[str, str]:
    return f"{boundary.domain}/{page_tokens}", tenant


def _salt(realm: tuple[str, str]) -> bytes:
    """Return the part of a key that stands for domain and tenant."""
    return blake2b("\x1f".join((str(len(realm[0])), *realm)).encode(), digest_size=16).digest()
