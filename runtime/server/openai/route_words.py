"""Texts for descriptions of the HTTP interface (docs/http.md, /openapi.json, /docs): responses, errors, examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """What the page states about a route.

    Fields:
        response: Format of the response.
        query: Parameters of the query.
        errors: Reasons by status, in addition to those of every route.
    """

    response: str
    query: str = ""
    errors: Mapping[int, str] = field(default_factory=dict)


_MODEL = """{"id", "object": "model", "created", "owned_by": "blockzoo", "root", "parent", "max_model_len"}"""
_USAGE = (
    """"usage": {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details": {"cached_tokens"}}"""
)
_GENERATING = {
    400: "a field is wrong, or unsupported; the context is too long",
    404: "no served model of that name",
    408: "the body took longer than a minute",
    409: "with a key: the request was aborted, or its model changed while it was answered",
    413: "the body is larger than 8 MiB",
    422: "with a key: it came with another body before",
    429: "the server is full (--max-queued); `Retry-After` says when to try again",
    503: "the server drains, or its engine died",
}
_READING = {
    status: _GENERATING[status] if status != 400 else "a field is wrong, or unsupported; the model has no tokenizer"
    for status in (400, 404, 408, 413, 429, 503)
}
_DURABLE = (
    """{"id", "state": "queued" | "running" | "done" | "failed" | "cancelled" | "dead", "model", "created", "ended", """
    """"attempts", "batch", "status", "answer"}; `status` and `answer` are null until it has ended"""
)
_NO_DURABLE = {404: "no durable request of that id, or that of another key's owner; the server runs without --queue"}
_NO_REQUEST = {404: "no request of that id runs or waits"}

#: By method and path.
_NO_QUEUE = "the server runs without `--queue`"
_FILE = """{"id": "file-…", "object": "file", "bytes", "created_at", "expires_at", "filename", "purpose", "status"}"""
_BATCH = (
    """{"id": "batch_…", "object": "batch", "endpoint", "status", "input_file_id", "output_file_id", """
    """"error_file_id", "completion_window", "request_counts": {"total", "completed", "failed"}, "errors", """
    """"metadata", "created_at", "in_progress_at", "expires_at", …}"""
)
_RESPONSE = (
    """{"id": "resp_…", "object": "response", "created_at", "status": "completed" | "incomplete" | "queued" | """
    """"in_progress" | "failed" | "cancelled", "error", "incomplete_details", "model", "output": [message | """
    """function_call], "usage": {"input_tokens", "output_tokens", "total_tokens", …}, …}; see [apis.md](apis.md)"""
)
_NO_RESPONSE = {
    404: "no kept response of that id",
    501: "the server runs without `--queue`, and has no response of that id in the background",
}
_LIST = """{{"object": "list", "data": [{}], "first_id", "last_id", "has_more"}}"""

_NO_HEADER = "without the header `X-Zoo-Page`"
_ALIAS = (
    """{"alias", "change", "act": "set" | "rollback", "targets": [{"model", "share"}], "figures", "created", """
    """"before": [{"model", "share"}] | null}, as the catalogue has it from now on; `GET /zoo/aliases` says when it """
    """is switched here"""
)
_NO_ALIAS = {403: "a client's key, or the server has none", 404: "no stored model of that name"}
_UPKEEP = {403: f"{_NO_HEADER}, or on a server without a key", 409: "the store is being verified or collected already"}
_HTML = "HTML, or with an error's status a page that says it"

#: Bodies that the routes take, with a model named `MODEL`.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "POST /v1/completions": {"model": "MODEL", "prompt": "def main():", "max_tokens": 16, "temperature": 0},
    "POST /v1/chat/completions": {
        "model": "MODEL",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
    },
    "POST /v1/responses": {"model": "MODEL", "input": "Hello", "max_output_tokens": 16},
    "POST /v1/embeddings": {"model": "MODEL", "input": ["one text", "another one"]},
    "POST /v1/messages": {
        "model": "MODEL",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "Hello"}],
    },
    "POST /v1/messages/count_tokens": {"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]},
    "POST /tokenize": {"model": "MODEL", "prompt": "Hello"},
    "POST /detokenize": {"model": "MODEL", "tokens": [72, 73]},
    "POST /v1/batches": {
        "input_file_id": "file-…",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "POST /zoo/aliases": {"name": "prod", "target": "run@step-300"},
    "POST /zoo/aliases/rollback": {"name": "prod"},
    "POST /zoo/roles": {"agent-0": "prefill", "agent-1": "decode"},
}

ROUTES: Mapping[str, Said] = {
    "POST /v1/completions": Said(
        """{"id": "cmpl-…", "object": "text_completion", "created", "model", "choices": """
        + """[{"index", "text", "logprobs", """
        + """"finish_reason"}], """
        + _USAGE
        + """}""",
        errors=_GENERATING,
    ),
    "POST /v1/chat/completions": Said(
        """{"id": "chatcmpl-…", "object": "chat.completion", "created", "model", "choices": """
        + """[{"index", "message": {"role", "content", "tool_calls"}, """
        + """"logprobs", "finish_reason"}], """
        + _USAGE
        + """}""",
        errors=_GENERATING,
    ),
    "POST /v1/responses": Said(
        _RESPONSE,
        errors=_GENERATING | {413: "the body, or the conversation that it continues, is larger than 8 MiB"},
    ),
    "GET /v1/responses/{id}": Said(
        _RESPONSE,
        "`stream`: true for its events; `starting_after`: the number of an event, behind which they begin",
        _NO_RESPONSE | {400: "a wrong query, or it was not asked for as a stream"},
    ),
    "POST /v1/responses/{id}/cancel": Said(
        _RESPONSE, errors=_NO_RESPONSE | {400: "it was not asked for with `background`"}
    ),
    "DELETE /v1/responses/{id}": Said("""{"id", "object": "response", "deleted": true}""", errors=_NO_RESPONSE),
    "GET /v1/responses/{id}/input_items": Said(
        _LIST.format("""{"id", "type", "role", "content"}"""),
        "`limit`, `after`; `order`: desc or asc",
        _NO_RESPONSE | {400: "a wrong query"},
    ),
    "POST /v1/embeddings": Said(
        """{"object": "list", "data": [{"object": "embedding", "index", "embedding": [number] | base64}], "model", """
        """"usage": {"prompt_tokens", "total_tokens"}}""",
        errors=_GENERATING,
    ),
    "POST /v1/messages": Said(
        """{"id": "msg_…", "type": "message", "role": "assistant", "model", "content": [{"type": "text", "text"} | """
        """{"type": "tool_use", "id", "name", "input"}], "stop_reason", "stop_sequence", """
        """"usage": {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"}}; """
        """see [apis.md](apis.md)""",
        errors=_GENERATING,
    ),
    "POST /v1/messages/count_tokens": Said("""{"input_tokens"}""", errors=_READING),
    "POST /tokenize": Said(
        """{"count", "max_model_len", "tokens": [id], "token_strs": [text] | null}; a text may be longer than the """
        """model's context""",
        errors=_READING,
    ),
    "POST /detokenize": Said("""{"prompt"}; special tokens are in the text""", errors=_READING),
    "GET /v1/models": Said("""{"object": "list", "data": [""" + _MODEL + """]}"""),
    "GET /v1/models/{name:path}": Said(_MODEL, errors={404: "no served model of that name"}),
    "POST /v1/files": Said(
        _FILE,
        errors={
            400: "a form that cannot be read, another purpose",
            413: "a file over `batches.file_bytes` (200 MiB)",
            415: "a body that is no form",
            501: _NO_QUEUE,
            507: "all files together would take more than `batches.total_bytes` (16 GiB)",
        },
    ),
    "GET /v1/files": Said(_LIST.format(_FILE), "`limit`, `after`, `purpose`", {501: _NO_QUEUE}),
    "GET /v1/files/{id}": Said(_FILE, errors={404: "no such file", 501: _NO_QUEUE}),
    "GET /v1/files/{id}/content": Said("the file's bytes", errors={404: "no such file", 501: _NO_QUEUE}),
    "DELETE /v1/files/{id}": Said(
        """{"id", "object": "file", "deleted": true}""",
        errors={404: "no such file", 409: "a batch that has not ended reads it", 501: _NO_QUEUE},
    ),
    "POST /v1/batches": Said(
        _BATCH,
        errors={
            400: "a wrong field",
            404: "no such file",
            422: "the `Idempotency-Key` was used for another batch",
            429: "`batches.max_unended` (1000) batches have not ended",
            501: _NO_QUEUE,
        },
    ),
    "GET /v1/batches": Said(_LIST.format(_BATCH), "`limit`, `after`", {501: _NO_QUEUE}),
    "GET /v1/batches/{id}": Said(_BATCH, errors={404: "no such batch", 501: _NO_QUEUE}),
    "POST /v1/batches/{id}/cancel": Said(
        _BATCH, errors={404: "no such batch", 409: "it has ended, or its results are written", 501: _NO_QUEUE}
    ),
    "GET /health": Said(
        """{"status": "ok" | "degraded" | "draining" | "dead"}; with the key of a server that has one also """
        """`"agents": [{"device", "phase", "deaths", …}]`, and `"unavailable": {model: reason}` where there are any""",
        errors={503: "the driver is dead, or the server drains"},
    ),
    "GET /openapi.json": Said("the document"),
    "GET /docs": Said(_HTML),
    "GET /live": Said("""{"status": "live"}"""),
    "GET /metrics": Said("""Prometheus' text format; see Metrics below"""),
    "GET /": Said(_HTML, query="`q`: text that names hold; `sort`, `page`", errors={400: "a wrong query"}),
    "GET /ui/lineage": Said(_HTML),
    "GET /ui/models/{name:path}": Said(_HTML, errors={404: "no stored model of that name"}),
    "GET /ui/live": Said(_HTML),
    "GET /ui/live/events": Said(
        "server-sent events, each a piece of HTML",
        errors={404: "nothing is served (`zoo ui`)", 503: "32 browsers watch already"},
    ),
    "GET /ui/compare": Said(_HTML, "`a`, `b`: two models", {404: "no stored model of that name"}),
    "POST /ui/compare/distances": Said(
        """{"distances": [number or null, by pair of components], "share": of the differing bytes that were read}""",
        "`a`, `b`: two models",
        {403: _NO_HEADER, 404: "no stored model of that name", 503: "distances are being measured"},
    ),
    "GET /ui/playground": Said(_HTML, query="`model`: chosen from the beginning; may be repeated"),
    "GET /ui/keys": Said(_HTML),
    "GET /ui/upkeep": Said(_HTML),
    "GET /ui/upkeep/state": Said("a piece of HTML"),
    "POST /ui/upkeep/verify": Said("""{"started": "verify"}""", errors=_UPKEEP),
    "POST /ui/upkeep/gc": Said("""{"started": "gc" | "count"}""", "`dry_run=1`: only count", _UPKEEP),
    "GET /ui/patterns": Said(_HTML),
    "GET /ui/zoo.js": Said("JavaScript"),
    "GET /ui/login": Said(
        f"{_HTML}; without a key a redirect (303) to the models", query="`next`: the view to go on to"
    ),
    "POST /ui/login": Said(
        "a redirect (303) with the session's cookie",
        errors={
            401: "not the key",
            403: "sent from another site",
            429: "10 wrong keys from the address, or 60 altogether, within a minute; see `Retry-After`",
        },
    ),
    "POST /ui/logout": Said("a redirect (303) to the login", errors={403: "sent from another site"}),
    "GET /ui/zoo.css": Said("CSS"),
    "GET /ui/icon.svg": Said("SVG"),
    "GET /zoo/aliases": Said(
        """{"aliases": [{"name", "targets": [{"model", "share"}] | null, "change", "wanted": {"targets", "change"} """
        """| null, "error"}]}; `wanted` is a change that waits for its models, `error` why they cannot be served"""
    ),
    "POST /zoo/aliases": Said(
        _ALIAS,
        errors=_NO_ALIAS
        | {
            400: "a wrong field, shares that do not add up to 100, a target that does not answer by itself",
            409: "a model has the name, or the alias has changed since `expected`",
        },
    ),
    "POST /zoo/aliases/rollback": Said(
        _ALIAS,
        errors=_NO_ALIAS | {400: "it has pointed to nothing else", 404: "no such alias, or its earlier model is gone"},
    ),
    "GET /zoo/models": Said(
        """{"models": [{"name", "kind", "base", "family", "params", "blocks", "bytes", "bytes_own", …, "loaded"}]}"""
    ),
    "GET /zoo/state": Said(
        """{"agents": [{"id", "pid", "device", "alive", "role": "both" | "prefill" | "decode", """
        """"instances": [{"block", "queue", "batch", "batch_limit"}], "pages"}], """
        """"models": [{"name", "running", "waiting", …}], "running", """
        """"waiting", "draining", "counters", "memory"}; `cluster` where a scheduler runs, """
        """`"queue": {"waiting", "running", "dead"}` with `--queue`"""
    ),
    "GET /zoo/ledger": Said(
        """{"instances": [{"id", "capacity", "free", "lent": {debtor: pages}, "borrowed": {creditor: pages}}]}"""
    ),
    "POST /zoo/roles": Said(
        """{"roles": {agent: role}}""",
        errors={
            400: "a body that gives no roles, or an unknown role",
            409: "an unknown agent, a model without devices for a phase, another option that excludes roles; nothing "
            "was changed",
        },
    ),
    "GET /zoo/trace": Said(
        """JSON lines, one event each""",
        query="`limit`: the latest so many events",
        errors={404: "the server runs without --trace"},
    ),
    "POST /zoo/requests/{id}/pause": Said(
        """{"id", "paused": true, "sequences"}""",
        query="`expected_ms`: how long the pause is expected to take",
        errors=_NO_REQUEST,
    ),
    "POST /zoo/requests/{id}/resume": Said("""{"id", "paused": false, "sequences"}""", errors=_NO_REQUEST),
    "GET /zoo/requests/{id}": Said(_DURABLE, errors=_NO_DURABLE),
    "DELETE /zoo/requests/{id}": Said(_DURABLE, errors=_NO_DURABLE),
    "GET /zoo/requests/{id}/events": Said(
        """server-sent events as of the generating route, behind `Last-Event-ID` where that header is sent""",
        errors={**_NO_DURABLE, 409: "the request is a line of a batch that does not run here now"},
    ),
    "POST /zoo/models/{name:path}/load": Said(
        _MODEL, errors={400: "the model cannot be served", 404: "no stored model of that name"}
    ),
    "POST /zoo/models/{name:path}/unload": Said(
        """{"unloaded": name}""", errors={404: "no served model of that name", 409: "its requests did not end in time"}
    ),
}
