"""The body of OpenAI's embeddings: texts of which the final hidden states are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from runtime.frontend.errors import unsupported
from runtime.frontend.schemas import BodyPart, Prompts, ServedBody
from runtime.types import Pooling


class EmbeddingBody(ServedBody):
    """POST /v1/embeddings."""

    expected: ClassVar[Mapping[str, str]] = {
        "input": BodyPart.expected["prompt"],
        "encoding_format": '"float" or "base64"',
        "pooling": '"mean" or "last"',
    }

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Any = None
    pooling: Pooling | None = None
    normalize: bool | None = None

    def require_supported(self) -> None:
        if self.dimensions is not None:
            raise unsupported("dimensions", "embeddings here have the width of their model")
