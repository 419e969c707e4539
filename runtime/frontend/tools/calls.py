"""Read calls from the text of an answer as it comes: its content, and the parts of calls in OpenAI's shape.

    text --> content ... mark --> {"name": "f", "arguments": --> {...} --> } ... content or the next call

The name is reported once it is complete, the arguments as their text comes. What begins like a call and is none becomes
content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.frontend.tools.formats import CallFormat

#: Characters in which a call's name is expected; longer beginnings are no call.
_LONGEST_HEAD = 2048


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call: its id and name with the first one, more text of its arguments with others."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Read:
    """What some text gave: more content, and parts of calls."""

    content: str = ""
    parts: list[CallPart] = field(default_factory=list)


class CallReader:
    """Reads the calls of one answer.

    Args:
        mark: The token of the mark if it is special, since it is no part of the text then.
        name_id: Returns the id of the call with a number.
        several: Whether there may be several calls; further ones are dropped.
    """

    def __init__(self, form: CallFormat, mark: int | None, name_id: Callable[[int], str], several: bool = True) -> None:
        self._form, self._mark, self._id, self._several = form, mark, name_id, several
        key = "arguments|parameters"
        self._head = re.compile(rf'\s*\[?\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:{key})"\s*:\s*(?=\{{)')
        self._state: Literal["start", "text", "head", "arguments", "tail", "content"] = "start"
        self._held = ""
        self._value = _JsonObject()
        self.calls = 0

    def push(self, text: str, tokens: Sequence[int]) -> Read:
        """Read more text, and the tokens that it came from."""
        read = Read()
        if self._mark is not None and self._mark in tokens and self._state in ("start", "text"):
            read.content += self._held
            self._held, self._state = "", "head"
        self._held += text
        while self._step(read):
            pass
        return read

    def finish(self) -> Read:
        """Read the end of the answer."""
        read = Read()
        if self._state == "head" and not self._whole(read):
            read.content += (self._form.mark if self._mark is None else "") + self._held
        elif self._state in ("start", "text", "content") and not (self.calls and self._held.isspace()):
            read.content += self._held
        self._held = ""
        return read

    def _step(self, read: Read) -> bool:
        """Advance by one state; return whether there may be more to do."""
        return bool(getattr(self, f"_in_{self._state}")(read)) if self._held else False

    def _in_start(self, read: Read) -> bool:
        if self._form.mark:
            self._state = "text"
            return True
        begun = self._held.lstrip()
        if begun:
            self._state = "head" if begun[0] == "{" else "content"
        return bool(begun)

    def _in_text(self, read: Read) -> bool:
        """Content up to the mark. White space is held back: it may stand before a mark, or at the end."""
        if self._mark is not None:
            read.content, self._held = read.content + self._held, ""
            return False
        before, mark, behind = self._held.partition(self._form.mark)
        if mark:
            read.content += before.rstrip()
            self._held, self._state = behind, "head"
            return True
        kept = len(before.rstrip())
        for length in range(min(len(self._form.mark), kept), 0, -1):
            if before[:kept].endswith(self._form.mark[:length]):
                kept = len(before[: kept - length].rstrip())
                break
        read.content, self._held = read.content + before[:kept], before[kept:]
        return False

    def _in_head(self, read: Read) -> bool:
        found = self._head.match(self._held)
        if found is not None:
            self._begin(str(json.loads(found[1])), read)
            self._held, self._state, self._value = self._held[found.end() :], "arguments", _JsonObject()
            return True
        if self._form.each and self._form.close.strip() in self._held and self._whole(read):
            return True
        if len(self._held) > _LONGEST_HEAD:
            read.content += (self._form.mark if self._mark is None else "") + self._held
            self._held, self._state = "", "content"
        return False

    def _in_arguments(self, read: Read) -> bool:
        end = self._value.end(self._held)
        text, self._held = self._held[:end], self._held[end:]
        if self._wanted:
            read.parts.append(CallPart(self.calls - 1, text))
        if self._value.over:
            self._state = "tail"
        return self._value.over

    def _in_tail(self, read: Read) -> bool:
        """Between calls: brackets, separators and end marks are dropped."""
        self._held = self._held.lstrip("}],; \n\t\r")
        close = self._form.close.strip()
        if self._form.each:
            if close.startswith(self._held) and len(self._held) < len(close):
                return False
            self._held, self._state = self._held.removeprefix(close), "text"
            return True
        if self._held:
            self._state = "head" if self._held[0] == "{" else "content"
        return bool(self._held)

    def _in_content(self, read: Read) -> bool:
        read.content, self._held = read.content + self._held, ""
        return False

    @property
    def _wanted(self) -> bool:
        return self._several or self.calls == 1

    def _begin(self, name: str, read: Read) -> None:
        self.calls += 1
        if self._wanted:
            read.parts.append(CallPart(self.calls - 1, "", self._id(self.calls - 1), name))

    def _whole(self, read: Read) -> bool:
        """Read a call that is complete, and has its keys in another order; return whether it is one."""
        try:
            found: Any
            found, end = json.JSONDecoder().raw_decode(self._held.strip())
            name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return False
        self._begin(name, read)
        if self._wanted:
            read.parts.append(CallPart(self.calls - 1, json.dumps(arguments, ensure_ascii=False)))
        self._held, self._state = self._held.strip()[end:], "tail"
        return True


class _JsonObject:
    """Finds the end of a JSON object of which the text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self.over = False

    def end(self, text: str) -> int:
        """Return how many characters of the text are the object's."""
        for at, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.over = True
                    return at + 1
        return len(text)
