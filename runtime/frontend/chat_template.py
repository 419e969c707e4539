"""A model's chat template: a conversation as the text that the model was trained to answer.

The template is a program of the model's author. It runs in a sandbox with bounds
(`runtime.frontend.template_sandbox`), and renders what transformers' `apply_chat_template` renders. Knows nothing
of token ids.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

    from runtime.frontend.template_sandbox import BoundedEnvironment

#: Characters of a template. The longest in use, with tools and their formats, have some ten thousand.
MAX_SOURCE = 200_000
DEFAULT = "default"


class TemplateRefused(Exception):
    """A template that cannot be used, or that refuses a conversation; the message says why."""


class ChatTemplate:
    """One template and the special tokens that it may write. It is compiled when it is first used."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: by the names under which templates know them, as `bos_token`."""
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        self._compiled: Template | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """The conversation, ready for the assistant's turn. Raises TemplateRefused."""
        environment = _environment()
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
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise TemplateRefused(" ".join(str(error).split()) or type(error).__name__) from error

    def _template(self, environment: BoundedEnvironment) -> Template:
        with self._lock:
            if self._compiled is None:
                if len(self._source) > MAX_SOURCE:
                    raise TemplateRefused(f"it has {len(self._source):,} characters, and may have {MAX_SOURCE:,}")
                self._compiled = environment.from_string(self._source)
            return self._compiled


def chosen_template(given: Any) -> str | None:
    """The template to use out of what `tokenizer_config.json` holds: one text, or several by name, of which
    `default` counts.
    """
    if isinstance(given, list):
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, Mapping)}
    if isinstance(given, Mapping):
        given = given.get(DEFAULT)
    return given if isinstance(given, str) and given else None


@lru_cache(maxsize=1)
def _environment() -> BoundedEnvironment:
    """The one that all templates share, made when the first is used: its import takes longer than a template."""
    from runtime.frontend.template_sandbox import BoundedEnvironment

    return BoundedEnvironment()
