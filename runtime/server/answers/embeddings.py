"""Word pooled hidden states as OpenAI's embeddings."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence

from runtime.frontend.apis.embeddings import EmbeddingBody
from runtime.frontend.assemble import Generation
from runtime.server.openai.format import Document, FinishedChoice


class EmbeddingWording:
    """POST /v1/embeddings."""

    def __init__(self, generation: Generation) -> None:
        if not isinstance(generation.asked, EmbeddingBody):
            raise TypeError(type(generation.asked).__name__)
        self._generation, self._body = generation, generation.asked

    def whole(self, choices: Sequence[FinishedChoice]) -> Document:
        """Return the list of embeddings, in the order of the texts."""
        receipt, model = self._generation.receipt, self._generation.model
        served = {} if model.asked is None else {"served_by": model.name}
        instead = {choice.served for choice in choices}
        if len(instead) == 1 and (name := instead.pop()) is not None:
            served = {"served_by": name}
        tokens = self._generation.prompt_tokens
        return {
            "id": receipt.id,
            "object": "list",
            "created": receipt.created,
            "model": model.asked or model.name,
            **served,
            "data": [
                {"object": "embedding", "index": choice.index, "embedding": self._vector(choice)} for choice in choices
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _vector(self, choice: FinishedChoice) -> list[float] | str:
        """Return one embedding, as numbers or as base64 of float32."""
        states = choice.states
        length = math.hypot(*states) if self._body.normalize is not False else 1.0
        vector = array("f", [value / (length or 1.0) for value in states])
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        return vector.tolist()
