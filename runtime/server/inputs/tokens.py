"""The routes from text to token ids and back."""

from __future__ import annotations

from starlette.routing import Route

from runtime.frontend.apis.messages import MessagePromptBody
from runtime.frontend.apis.tokens import DetokenizeBody, Document, TokenizeBody, count_tokens, detokenize, tokenize
from runtime.server.context import Service
from runtime.server.inputs.reading import Reading
from runtime.server.model_choice import model_for
from runtime.server.request_runner import limits_of


def token_routes(service: Service) -> list[Route]:
    """Return the routes of tokenizers."""
    return [
        Route("/tokenize", Reading(service, TokenizeBody, _tokenize), methods=["POST"]),
        Route("/detokenize", Reading(service, DetokenizeBody, _detokenize), methods=["POST"]),
        Route("/v1/messages/count_tokens", Reading(service, MessagePromptBody, _count_tokens), methods=["POST"]),
    ]


def _tokenize(service: Service, body: TokenizeBody) -> Document:
    """Return the token ids of a text or a conversation."""
    return tokenize(body, service.models.find(body.model), limits_of(service))


def _count_tokens(service: Service, body: MessagePromptBody) -> Document:
    """Return how many tokens a conversation has (Anthropic's Messages)."""
    return count_tokens(body, model_for(service, body), limits_of(service))


def _detokenize(service: Service, body: DetokenizeBody) -> Document:
    """Return the text of token ids."""
    return detokenize(body, service.models.find(body.model))
