"""vLLM's default loader, which reads the weights of folders with a `blockzoo.json` from their store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surgery.vllm.stored_weights import StoredWeights, read_stored_weights
from surgery.vllm.weights import read_weights
from zoo.errors import InputError

#: The name of this way to load, beside being the default one's.
FORMAT = "blockzoo"


def stored_loader(default: type[Any]) -> type[Any]:
    """Return a subclass of vLLM's default loader. All but the source of the weights is the default's own."""

    class StoredModelLoader(default):  # type: ignore[misc]
        """Loads weights by digest; models without a `blockzoo.json` as the default does."""

        def download_model(self, model_config: Any) -> None:
            if self._stored(model_config) is None:
                super().download_model(model_config)

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            stored = self._stored(model_config)
            if stored is None:
                yield from super().get_all_weights(model_config, model)
                return
            self.counter_before_loading_weights = time.perf_counter()  # of the time that vLLM logs
            yield from read_weights(stored)

        def _stored(self, model_config: Any) -> StoredWeights | None:
            stored = read_stored_weights(Path(model_config.model).expanduser())
            if stored is None and self.load_config.load_format == FORMAT:
                raise InputError(
                    f"{model_config.model} has no blockzoo.json: `zoo export NAME DIR --for vllm` writes it"
                )
            return stored

    return StoredModelLoader
