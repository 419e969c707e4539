"""Bodies of vLLM's routes from text to token ids and back, and the answers of these and of counts. Call them on a
worker thread.

A text may be longer than the model's context, since that is what its length is asked for; the server bounds the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from runtime.frontend.apis.messages import MessagePromptBody
from runtime.frontend.assemble import Limits, chat_prompt, fields_of, known_tokens
from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.schemas import BodyPart, ChatBody, ChatMessage, TokenIds
from runtime.frontend.served_models import ServedModel
from runtime.frontend.tokenizer import NoTokenizer, printable
from runtime.frontend.tools.bodies import MAX_TOOLS, Tool

Document = dict[str, Any]


class TokenizeBody(BodyPart):
    """POST /tokenize: a text, or a conversation as chat takes it."""

    expected: ClassVar[Mapping[str, str]] = {**BodyPart.expected, "prompt": "a string"}

    model: str
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def require_supported(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give a prompt or messages", param="prompt")
        if self.messages is None:
            return
        if self.add_special_tokens:
            raise unsupported("add_special_tokens", "a chat template writes its own special tokens")
        if self.add_generation_prompt is False:
            raise unsupported("add_generation_prompt", "conversations here end where the answer begins")
        self.chat().require_supported()

    def chat(self) -> ChatBody:
        """Return the conversation as the body of a chat."""
        return ChatBody(model=self.model, messages=self.messages or [], tools=self.tools)


class DetokenizeBody(BodyPart):
    """POST /detokenize."""

    model: str
    tokens: TokenIds


def tokenize(body: TokenizeBody, model: ServedModel, limits: Limits) -> Document:
    """Return the token ids that completions or chat would take for a body. Raises RequestError 400, 429."""
    if body.prompt is not None:
        tokens = model.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    else:
        tokens = list(chat_prompt(body.chat(), model, limits)[0].tokens)
    names = None
    if body.return_token_strs:  # one object per token of the vocabulary, however long the text is
        printed = {token: printable(model.tokenizer.token_bytes(token)) for token in set(tokens)}
        names = [printed[token] for token in tokens]
    return {"count": len(tokens), "max_model_len": model.spec.max_model_len, "tokens": tokens, "token_strs": names}


def count_tokens(body: MessagePromptBody, model: ServedModel, limits: Limits) -> Document:
    """Return how many tokens a conversation has. Raises RequestError 400, 429."""
    with fields_of(body.chat_fields):
        return {"input_tokens": len(chat_prompt(body.chat(), model, limits)[0].tokens)}


def detokenize(body: DetokenizeBody, model: ServedModel) -> Document:
    """Return the text of token ids, special ones included. Raises RequestError 400."""
    if isinstance(model.tokenizer, NoTokenizer):
        raise RequestError("this model has no tokenizer: its token ids have no text", param="tokens")
    known = known_tokens(body.tokens, model, "tokens") if body.tokens else ()
    return {"prompt": model.tokenizer.decode(known, special=True)}
