"""Hold hidden states of prompts at boundaries of chains, in host memory (UN-15).

    a row that runs --save--> states, by key, one per page set --find--> a sequence of another chain, with these layers

The scheduler decides what is saved and dropped, within its limit (`scheduler.kv.shared_prompts`). A key stands for the
boundary's domain, the tenant, and all tokens up to the end of the page set. A sequence that starts from states holds
them itself, so they may be dropped at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.chains import Array, cut
from runtime.messages import PromptSave


class PromptStates:
    """The saved hidden states of one device: arrays [page tokens, width] by key."""

    def __init__(self) -> None:
        self._states: dict[bytes, Array] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(len(array.data) for array in self._states.values())

    def save(self, key: bytes, array: Array) -> None:
        self._states[key] = array

    def drop_keys(self, keys: Iterable[bytes]) -> None:
        """Drop states; unknown keys are ignored, because the rows that were to save them may have failed."""
        for key in keys:
            self._states.pop(key, None)

    def find(self, keys: Sequence[bytes]) -> tuple[Array, ...] | None:
        """Return the states with these keys; None if one is missing."""
        found = [self._states.get(key) for key in keys]
        return None if None in found else tuple(array for array in found if array is not None)


@dataclass(frozen=True, slots=True)
class EnteringPrompt:
    """The first `tokens` tokens of a sequence, which enter its stage at component `at` with these states."""

    at: int
    tokens: int
    states: tuple[Array, ...]

    def array(self, start: int, count: int) -> Array:
        """Return the hidden states [count, width] of the tokens from position `start` on."""
        width = self.states[0].shape[0]
        first, last = start // width, -(-(start + count) // width)
        return cut(joined_states(self.states[first:last]), start - first * width, start - first * width + count)


@dataclass(slots=True)
class SavingPrompt:
    """Collect what a sequence's rows return, and save each page set when it is complete.

    Fields:
        saves: By component that the states enter: keys of the prompt's page sets from the first on; empty for page sets
            that are not to be saved.
        width: Tokens per page set.
        end: Position behind the last token with states to be saved.
    """

    states: PromptStates
    saves: tuple[PromptSave, ...]
    width: int
    end: int = field(init=False)
    _parts: dict[int, list[Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = [index + 1 for each in self.saves for index, key in enumerate(each.keys) if key]
        self.end = self.width * max(wanted, default=0)

    def wanted(self, start: int, count: int, enters: int) -> tuple[int, ...]:
        """Return the components of which a row of `count` tokens should return the input; it enters at `enters`."""
        if start >= self.end:
            return ()
        first, last = start // self.width, -(-(start + count) // self.width)
        return tuple(each.at for each in self.saves if each.at > enters and any(each.keys[first:last]))

    def returned(self, start: int, saved: Mapping[int, Array]) -> None:
        """Take what a row returned, for tokens from position `start` on. Rows come in the order of their tokens."""
        for each in self.saves:
            array = saved.get(each.at)
            if array is None:
                self._parts.pop(each.at, None)
                continue
            at = start
            while at < start + array.shape[0]:
                index, within = divmod(at, self.width)
                end = min((index + 1) * self.width, start + array.shape[0])
                self._add(each, index, within, cut(array, at - start, end - start))
                at = end

    def _add(self, save: PromptSave, index: int, within: int, part: Array) -> None:
        """Add a part of a page set that begins `within` tokens after its beginning."""
        parts = self._parts.setdefault(save.at, [])
        if not within:
            parts.clear()
        if sum(each.shape[0] for each in parts) != within:
            return  # its beginning was not run here
        parts.append(part)
        if within + part.shape[0] == self.width:
            key = save.keys[index] if index < len(save.keys) else b""
            if key:
                self.states.save(key, joined_states(parts))
            parts.clear()


def joined_states(parts: Sequence[Array]) -> Array:
    """Return arrays [tokens, width] as one, with a copy of their bytes in host memory."""
    tokens = sum(part.shape[0] for part in parts)
    data = b"".join(memoryview(part.data).cast("B") for part in parts)
    return Array(parts[0].dtype, (tokens, *parts[0].shape[1:]), data)
