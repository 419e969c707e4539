"""The routes from text to token ids and back."""

from __future__ import annotations

from starlette.routing import Route

from runtime.frontend.apis.tokens import DetokenizeBody, Document, TokenizeBody, detokenize, tokenize
from runtime.server.context import Service
from runtime.server.inputs.reading import Reading
from runtime.server.request_runner import limits_of


def token_routes(service: Service) -> list[Route]:
    """Return the routes of tokenizers."""
    return [
        Route("/tokenize", Reading(service, TokenizeBody, _tokenize), methods=["POST"]),
        Route("/detokenize", Reading(service, DetokenizeBody, _detokenize), methods=["POST"]),
    ]


def _tokenize(service: Service, body: TokenizeBody) -> Document:
    """Return the token ids of a text or a conversation."""
    return tokenize(body, service.models.find(body.model), limits_of(service))


def _detokenize(service: Service, body: DetokenizeBody) -> Document:
    """Return the text of token ids."""
    return detokenize(body, service.models.find(body.model))
