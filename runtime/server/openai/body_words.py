"""Texts for descriptions of the HTTP interface (docs/http.md, /openapi.json, /docs): fields of bodies."""

from __future__ import annotations

from collections.abc import Mapping

#: By field of a body. The fields in `VLLM` and `OURS` are not OpenAI's, and are marked on the page.
FIELDS: Mapping[str, str] = {
    "model": "Name of a served model, an alias, or a unique ending of a name.",
    "prompt": "The text to continue, or its token ids; a list of prompts gives `n` choices for each.",
    "messages": "The conversation: `role` is system, developer, user, assistant or tool; `content` is text, or a "
    "list of text parts.",
    "stream": "Answer by server-sent events, `data: [DONE]` at the end.",
    "stream_options": "With `include_usage` a stream ends with a chunk of token counts.",
    "n": "Choices per prompt; the server bounds it at 64.",
    "seed": "Makes sampling repeatable; choice k draws with seed + k.",
    "stop": "Texts before which a choice ends.",
    "max_tokens": "Tokens of the answer at most. Default: 16 for completions, what the context leaves for chat.",
    "max_completion_tokens": "The newer name of `max_tokens`.",
    "temperature": "0: greedy.",
    "top_p": "Sample from the likeliest tokens with this much probability.",
    "presence_penalty": "Subtracted from tokens that occurred in the answer.",
    "frequency_penalty": "Subtracted per occurrence.",
    "logit_bias": "Token id -> number that is added to its logit.",
    "logprobs": "Completions: so many alternatives per token. Chat: whether there are log-probabilities.",
    "top_logprobs": "Alternatives per token; needs `logprobs`.",
    "echo": "Repeat the prompt before the answer, with its log-probabilities where they are asked for.",
    "best_of": "Refused unless it is `n`.",
    "suffix": "Refused.",
    "tools": "Functions that the answer may call ([tools.md](tools.md)).",
    "tool_choice": "`auto`, `none`, `required`, or a function that the answer calls.",
    "parallel_tool_calls": "Whether there may be several calls.",
    "functions": "Refused unless empty: the older form of `tools`.",
    "audio": "Refused unless empty.",
    "modalities": 'Refused unless it is `["text"]`.',
    "response_format": "Constrains the answer to JSON, or to a JSON schema ([structured.md](structured.md)).",
    "structured_outputs": "Constrains it to one of: `json` (a schema), `regex`, `choice`, `grammar`, `json_object`.",
    "guided_json": "The older form of `structured_outputs`: a schema.",
    "guided_regex": "The same: a regular expression.",
    "guided_choice": "The same: a list of texts.",
    "guided_grammar": "The same: a grammar, in Lark's form or GBNF.",
    "top_k": "Sample from so many of the likeliest tokens; 0 or -1: all.",
    "min_p": "Sample from tokens at least this likely beside the likeliest.",
    "repetition_penalty": "Divides the logits of tokens that occurred.",
    "min_tokens": "No end before so many tokens.",
    "ignore_eos": "Go on after the model's end token.",
    "stop_token_ids": "Tokens that end a choice.",
    "priority": "Lower goes first, as in vLLM.",
    "return_token_ids": "Token ids of prompt and answer in the response.",
    "cache_salt": "Prompt prefixes are shared only among requests of the same salt.",
    "slo_ms": "Deadline in milliseconds, from the arrival to the end of the answer (--plan edf or qlm).",
    "ttft_slo_ms": "The same to the first token, instead of `slo_ms`.",
    "adaptive": "Allows an approximation to answer, where the server has one: equivalent blocks (--min-equivalence), "
    "--serve-deltas, --speculation similarity.",
    "early_exit": "Leave the model behind so many layers (--early-exit).",
    "user": "A name of the client's user: an alias of several models keeps to one for each "
    "([production.md](production.md)).",
    "safety_identifier": "The newer name of `user`.",
}
VLLM = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "priority",
    "return_token_ids",
    "cache_salt",
)
OURS = ("slo_ms", "ttft_slo_ms", "adaptive", "early_exit", "pooling", "normalize")

#: The interface that a body is of, where that is not OpenAI's.
ORIGINS: Mapping[str, str] = {"TokenizeBody": "vLLM", "DetokenizeBody": "vLLM"} | dict.fromkeys(
    ("MessagePromptBody", "MessageBody"), "Anthropic"
)
_MESSAGE = {
    "messages": "The conversation: turns of user and assistant; `content` is text, or blocks of the types `text`, "
    "`tool_use` and `tool_result`. The last turn is the user's.",
    "system": "What stands before the first turn: a text, or blocks of text.",
    "tools": "Functions that the answer may call, with their `input_schema` ([tools.md](tools.md)).",
    "tool_choice": "`type`: `auto`, `any`, `none`, or `tool` with a `name`.",
    "stop": "Refused: give `stop_sequences`.",
    "n": "Refused unless it is 1.",
    "response_format": "Refused: give `output_config`.",
    "output_config": "With `format`: constrains the answer to a JSON schema ([structured.md](structured.md)).",
    "thinking": 'Refused unless it is `{"type": "disabled"}`.',
    **dict.fromkeys(("container", "mcp_servers", "context_management"), "Refused unless empty."),
}
#: By body: fields that only it has, and those that mean something else in it.
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "TokenizeBody": {
        "prompt": "The text. Either this or `messages`.",
        "messages": "A conversation, as chat takes it, up to where its answer begins.",
        "tools": "The tools of the conversation.",
        "add_special_tokens": "Whether a text gets the special tokens that completions give it. Default: true. Refused "
        "with `messages`: a template writes its own.",
        "add_generation_prompt": "Refused unless it is true.",
        "return_token_strs": "Whether the answer has each token's text.",
    },
    "EmbeddingBody": {
        "input": "The text, or its token ids; a list of them gives as many embeddings.",
        "encoding_format": "`base64`: float32, little endian. Default: `float`.",
        "dimensions": "Refused.",
        "pooling": "Mean of all tokens' states, or the last one's. Default: `mean`.",
        "normalize": "Whether vectors get length 1. Default: true.",
    },
    "ResponseBody": {
        "input": "The conversation: a text, or items (messages, `function_call`, `function_call_output`).",
        "instructions": "A first message of the role system.",
        "max_tokens": "Refused: give `max_output_tokens`.",
        "max_output_tokens": "Tokens of the answer at most. Default: what the context leaves.",
        "n": "Refused unless it is 1.",
        "response_format": "Refused: give `text`.",
        "text": "With `format`: constrains the answer, as a chat's `response_format` ([structured.md](structured.md)).",
        "previous_response_id": "A kept response, behind whose conversation `input` goes on.",
        "store": "Whether the response is kept, on a server with `--queue`. Default: there, it is. With `background`: "
        "always.",
        "metadata": "Comes back with the response.",
        "include": "`message.output_text.logprobs`: texts have the log-probabilities of their tokens. "
        "`reasoning.encrypted_content`: there is none. Anything else is refused.",
        "top_logprobs": "Alternatives per token; needs `include`.",
        "truncation": "Refused unless it is `disabled`.",
        "background": "Answer at once: the response runs on, and is shown, followed and cancelled by its id.",
        **dict.fromkeys(
            ("conversation", "prompt", "reasoning", "max_tool_calls"),
            "Refused unless empty.",
        ),
    },
    "MessagePromptBody": _MESSAGE,
    "MessageBody": {
        **_MESSAGE,
        "max_tokens": "Tokens of the answer at most.",
        "stop_sequences": "Texts before which the answer ends.",
        "metadata": "`user_id`: as `user`.",
    },
    "DetokenizeBody": {"tokens": "Token ids of the model."},
}
