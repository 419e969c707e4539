"""Render a model's chat template: a conversation as the text that the model was trained to answer.

A template is a program by the model's author. It runs in a sandbox with bounds (`runtime.frontend.template_sandbox`)
and renders what transformers' `apply_chat_template` renders. Nothing here depends on token ids.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

    from runtime.frontend.template_sandbox import BoundedEnvironment

#: Characters of a template. The longest in use, with tools and their formats, have about ten thousand.
MAX_SOURCE = 200_000
DEFAULT = "default"
_CREATING = threading.Lock()


class TemplateRefused(Exception):
    """Raised when a template is unusable or rejects a conversation; the message has the reason."""


class ChatTemplate:
    """One template with its special tokens. It is compiled on first use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` is keyed by the names that templates use, such as `bos_token`."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._compiled: Template | None = None
        self._environment: BoundedEnvironment | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Return the conversation up to the start of the assistant's turn. Raises TemplateRefused."""
        # The one it is compiled in: a template of one environment cannot run within the limits of another.
        environment = self._environment = self._environment or _environment()
        given = {
            "messages": [dict(each) for each in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            with environment.running():
                template = self._template(environment)
                return environment.concat(template.generate({**given, **self._special_tokens, **more}))
        except TemplateRefused:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateRefused(" ".join(str(error).split()) or type(error).__name__) from error

    def _template(self, environment: BoundedEnvironment) -> Template:
        with self._lock:
            if self._compiled is None:
                if len(self.source) > MAX_SOURCE:
                    raise TemplateRefused(f"it has {len(self.source):,} characters, and may have {MAX_SOURCE:,}")
                self._compiled = environment.from_string(self.source)
            return self._compiled


def chosen_template(given: Any) -> str | None:
    """Return the template to use from the `chat_template` entry of `tokenizer_config.json`.

    The entry is one text, or several by name, of which `default` is used.
    """
    if isinstance(given, list):
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, Mapping)}
    if isinstance(given, Mapping):
        given = given.get(DEFAULT)
    return given if isinstance(given, str) and given else None


@lru_cache(maxsize=1)
def _made_environment() -> BoundedEnvironment:
    from runtime.frontend.template_sandbox import BoundedEnvironment

    return BoundedEnvironment()


def _environment() -> BoundedEnvironment:
    """Return the environment that all templates share. Created on first use: its import takes longer than rendering."""
    with _CREATING:
        return _made_environment()
