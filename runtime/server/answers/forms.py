"""The forms of answers: what each generating route parses, and how it words what was generated.

One record per route, for requests that live with their connection and for durable ones, which are worded again wherever
they are taken up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from runtime.frontend.apis.embeddings import EmbeddingBody
from runtime.frontend.apis.messages import MessageBody
from runtime.frontend.apis.responses import ResponseBody
from runtime.frontend.assemble import Generation
from runtime.frontend.errors import RequestError
from runtime.frontend.schemas import ChatBody, CompletionBody, ServedBody
from runtime.queueing.records import Kind
from runtime.server.answers.embeddings import EmbeddingWording
from runtime.server.answers.kept import SettledBody, is_answered_at_once, settle
from runtime.server.answers.messages import MessageWording, MessageWriter, message_failure, reworded_refusal
from runtime.server.answers.responses import ResponseWording, ResponseWriter, response_failure
from runtime.server.context import Service
from runtime.server.durable.store import RequestStore
from runtime.server.openai.format import ChatWording, ChunkWording, CompletionWording, Wording
from runtime.server.openai.sse import DONE, ChunkWriter, StreamWriter, event


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """One generating route.

    Fields:
        kind: Its requests in the queue.
        prefix: Of the ids of its answers.
        summary: What it does, for its documents.
        wording, writer: What words an answer whole, and as a stream; no writer: there are no streams.
        failure: Returns the event of an error in a stream of which so many events were sent.
        end: What ends a stream.
        reworded: Returns a stored error, by its status and document, in the form's own shape; None: it has that.
        settle: Returns a body that refers to nothing stored, and whether its answer is kept; None: a body is as it is.
        at_once: Returns whether a body asks to be answered before its answer is there; None: none does.
    """

    kind: Kind
    body: type[ServedBody]
    prefix: str
    summary: str
    wording: Callable[[Generation], Wording]
    writer: Callable[[Generation], StreamWriter] | None
    failure: Callable[[RequestError, int], bytes]
    end: bytes = b""
    reworded: Callable[[int, bytes], bytes] | None = None
    settle: Callable[[Service, RequestStore | None, bytes, str], Awaitable[SettledBody]] | None = None
    at_once: Callable[[Service, bytes], Awaitable[bool]] | None = None


def _plain_failure(error: RequestError, sent: int) -> bytes:
    return event(error.body())


def _chunk_writer(wording: ChunkWording, generation: Generation) -> ChunkWriter:
    return ChunkWriter(wording, generation.return_token_ids, generation.usage_chunk)


FORMS: tuple[AnswerForm, ...] = (
    AnswerForm(
        "completion",
        CompletionBody,
        "cmpl-",
        "Continue prompts.",
        CompletionWording,
        lambda generation: _chunk_writer(CompletionWording(generation), generation),
        _plain_failure,
        DONE,
    ),
    AnswerForm(
        "chat",
        ChatBody,
        "chatcmpl-",
        "Answer in a conversation.",
        ChatWording,
        lambda generation: _chunk_writer(ChatWording(generation), generation),
        _plain_failure,
        DONE,
    ),
    AnswerForm(
        "response",
        ResponseBody,
        "resp_",
        "Answer in a conversation, by items (OpenAI's Responses).",
        ResponseWording,
        ResponseWriter,
        response_failure,
        settle=settle,
        at_once=is_answered_at_once,
    ),
    AnswerForm(
        "message",
        MessageBody,
        "msg_",
        "Answer in a conversation (Anthropic's Messages).",
        MessageWording,
        MessageWriter,
        message_failure,
        reworded=reworded_refusal,
    ),
    AnswerForm(
        "embedding",
        EmbeddingBody,
        "embd-",
        "Return the mean of a text's final hidden states, or the last of them.",
        EmbeddingWording,
        None,
        _plain_failure,
    ),
)
_BY_KIND = {form.kind: form for form in FORMS}
_BY_BODY = {form.body: form for form in FORMS}


def form_of(generation: Generation) -> AnswerForm:
    """Return the form of a prepared request."""
    if generation.asked is not None:
        return _BY_BODY[type(generation.asked)]
    return _BY_BODY[ChatBody if generation.chat else CompletionBody]


def writer_of(form: AnswerForm, generation: Generation) -> StreamWriter:
    """Return what writes a stream. Raises TypeError for a form without streams."""
    if form.writer is None:
        raise TypeError(form.kind)
    return form.writer(generation)


def form_of_kind(kind: Kind) -> AnswerForm:
    """Return the form of a stored request."""
    return _BY_KIND[kind]


def form_of_body(body: type[ServedBody]) -> AnswerForm:
    """Return the form of bodies of a type."""
    return _BY_BODY[body]
