"""The state of an answer in its grammar depends on the output alone, however it came to be."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from runtime.grammars.compiled import CompiledGrammars
from runtime.grammars.limits import KEPT_GRAMMARS
from runtime.grammars.sources import from_choices, from_grammar, from_regex, from_schema
from runtime.grammars.state import GrammarState
from runtime.grammars.vocabulary import vocabulary_of

#: Texts of a small vocabulary; those of one character are all there, so that every text can be written.
TEXTS = [*map(chr, range(32, 127)), "ab", "abc", "bc", '{"', '": ', "\n", "</s>", "<pad>"]
END, PAD = len(TEXTS) - 2, len(TEXTS) - 1
SIZE = len(TEXTS) + 3


class Texts:
    """A tokenizer of `TEXTS`; its last two tokens are special."""

    def silent(self, token: int) -> bool:
        return token >= END

    def token_bytes(self, token: int) -> bytes:
        return TEXTS[token].encode() if token < len(TEXTS) else b""


@pytest.fixture(scope="module")
def grammars() -> CompiledGrammars:
    return CompiledGrammars(vocabulary_of(Texts(), SIZE, [END]))


class Told:
    """A state, and what it was told of its output: what changes of it is told next."""

    def __init__(self, state: GrammarState) -> None:
        self.state, self.output = state, list[int]()

    def allowed(self, output: list[int]) -> Any:
        same = [a == b for a, b in zip(self.output, output, strict=False)]
        kept = [*same, False].index(False)
        self.output = output
        return self.state.allowed(kept, output[kept:])


def state(grammars: CompiledGrammars, grammar: str) -> Told:
    return Told(GrammarState(grammars, grammar, SIZE, [END]))


def allowed(state: Told, *output: str) -> set[str]:
    words = state.allowed([TEXTS.index(text) for text in output])
    assert words.dtype == np.uint32 and len(words) == -(-SIZE // 32)
    found = {token for token in range(32 * len(words)) if int(words[token // 32]) >> token % 32 & 1}
    assert PAD not in found and max(found) < len(TEXTS)
    return {TEXTS[token] for token in found}


def test_any_tokens_of_an_allowed_text_are_allowed(grammars: CompiledGrammars) -> None:
    """Text that the grammar forces may come in pieces: an answer that satisfies it is never changed."""
    one = state(grammars, from_choices(["abc"]))
    assert allowed(one) == {"a", "ab", "abc"}
    assert allowed(one, "a") == {"b", "bc"}
    assert allowed(one, "ab", "c") == {"</s>"}


def test_the_end_is_allowed_where_the_grammar_accepts(grammars: CompiledGrammars) -> None:
    one = state(grammars, from_regex("[0-9]{2,3}"))
    assert "</s>" not in allowed(one, "1")
    assert allowed(one, "1", "2") == {*"0123456789", "</s>"}
    assert allowed(one, "1", "2", "3") == {"</s>"}


def test_other_outputs_than_the_one_before_are_computed_anew(grammars: CompiledGrammars) -> None:
    """Tokens that do not stand, a sequence that starts again from its output, and one that starts over."""
    grammar = from_schema({"type": "object", "properties": {"a": {"enum": ["x", 12]}}, "required": ["a"]})
    one, outputs = state(grammars, grammar), [(), ("{",), ("{", '"', "a"), ('{"', "a", '": ', "1"), ("{",), ()]
    for output in outputs:
        assert allowed(one, *output) == allowed(state(grammars, grammar), *output), output
    assert allowed(one, '{"', "a", '": ') & {"1", '"', "2"} == {"1", '"'}


def test_what_is_followed_slowly_has_the_same_masks(grammars: CompiledGrammars) -> None:
    grammar = from_choices(["abc", "ab12"])
    quick, slow = (GrammarState(grammars, grammar, SIZE, [END]) for _ in range(2))
    for kept, text in enumerate(["a", "b", "1", "2"]):
        new = [TEXTS.index(text)]
        assert (quick.allowed(kept, new) == slow.allowed(kept, new, slow=True)).all()
    for state in (quick, slow):
        assert (state.allowed(4, [TEXTS.index("z")], slow=state is slow) == state.allowed(4, [END])).all()


def test_an_output_has_no_gaps(grammars: CompiledGrammars) -> None:
    one = state(grammars, from_choices(["abc"]))
    assert allowed(one, "a") == {"b", "bc"}
    with pytest.raises(ValueError, match="token 3 follows 1 tokens"):
        one.state.allowed(3)


def test_beyond_its_limits_an_answer_can_only_end(grammars: CompiledGrammars) -> None:
    one = state(grammars, from_choices(["abc"]))
    assert allowed(one, "z") == {"</s>"}, "tokens that the grammar does not allow"
    hostile = state(grammars, from_regex("(.*a.{500}|b)*c"))
    text, draw = list[str](), random.Random(1)
    while allowed(hostile, *text) != {"</s>"}:
        text.append(draw.choice("aabz "))
        assert len(text) < 2000, "the limit on the states of the lexer is never reached"


def test_kept_grammars_are_bounded(grammars: CompiledGrammars) -> None:
    for number in range(KEPT_GRAMMARS + 20):
        grammars.matcher(from_grammar(f'start: "{number}"'))
    assert len(grammars) == KEPT_GRAMMARS and 0 < grammars.kept_bytes < 200 * KEPT_GRAMMARS
