"""vLLM's offline engine as a runner: one base model in memory at a time, with its LoRAs.

Bases are read from the store (`surgery.vllm`), LoRAs are exported into a temporary folder. The V1 engine is stepped
from here, so that every token has its time. vLLM is imported when the runner is made. Written against vLLM 0.32, tested
with its build for CPUs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.bench.drive import Clock
from runtime.bench.workload import WorkloadRequest
from zoo.errors import InputError, NotServable

if TYPE_CHECKING:
    from zoo.api import Zoo

#: The values vLLM accepts for `max_lora_rank`. It allocates that rank for every adapter, so the least sufficient one is
#: used for a fair comparison.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmRunner:
    """A `cli.bench.batches.Runner` over vLLM."""

    def __init__(self, zoo: Zoo, clock: Clock, dtype: str | None, models: Sequence[str]) -> None:
        """Import vLLM. Raises InputError if it is not installed.

        `models` are all that may be requested. A base without a LoRA among them runs without LoRA support, which is
        faster.
        """
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the report
        try:
            self._vllm: Any = importlib.import_module("vllm")
        except ImportError:
            raise InputError("the engine vllm needs the package vllm: pip install 'blockzoo[vllm]'") from None
        self._zoo = zoo
        self._clock = clock
        self._dtype = dtype
        self._models = tuple(models)
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-bench-")
        self._loaded: tuple[str, Any] | None = None
        self._adapters: dict[str, int] = {}
        self._asked = 0

    def run(self, model: str, asks: Sequence[WorkloadRequest]) -> list[tuple[float, ...]]:
        """Run one batch. The time to load the model counts, since the requests wait for it.

        Raises NotServable for adapters other than LoRAs.
        """
        handle = self._zoo.model(model)
        if handle.kind not in ("foundation", "full", "lora") and handle.base is not None:
            raise NotServable(f"{model}: vLLM runs whole models and LoRAs, not a {handle.kind}")
        lora = self._lora(model) if handle.kind == "lora" else None
        engine = self._engine(handle.base if handle.kind == "lora" and handle.base else model).llm_engine
        stamps: dict[str, list[float]] = {}
        for ask in asks:
            self._asked += 1
            name = str(self._asked)
            stamps[name] = []
            params = self._vllm.SamplingParams(temperature=0.0, max_tokens=ask.answer, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, params, lora_request=lora)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = self._clock.now()
            for output in outputs:
                own = stamps[output.request_id]
                own += [now] * (len(output.outputs[0].token_ids) - len(own))
        return [tuple(own) for own in stamps.values()]

    def close(self) -> None:
        self._shut_engine()
        self._folder.cleanup()

    def _engine(self, name: str) -> Any:
        if self._loaded is None or self._loaded[0] != name:
            self._shut_engine()
            folder = self._exported(name)
            # "auto" would choose bfloat16 for float32. Prefix caching is off because prompts repeat from round to
            # round.
            made = self._vllm.LLM(
                model=str(folder), dtype=self._dtype or str(self._zoo.model(name).config.get("dtype") or "auto"),
                skip_tokenizer_init=True, enable_prefix_caching=False, **self._room(name),
            )  # fmt: skip
            self._loaded = (name, made)
        return self._loaded[1]

    def _room(self, base: str) -> dict[str, Any]:
        """Return the settings for a base's LoRAs, one in use at a time. Raises NotServable if a rank is too large."""
        handles = (self._zoo.model(name) for name in self._models)
        loras = [handle.name for handle in handles if handle.kind == "lora" and handle.base == base]
        if not loras:
            return {}
        rank = max(_rank(self._exported(name)) for name in loras)
        if rank > _RANKS[-1]:
            raise NotServable(f"{base}: vLLM takes LoRAs up to rank {_RANKS[-1]}, not {rank}")
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": len(loras),
            "max_lora_rank": next(most for most in _RANKS if most >= rank),
        }

    def _lora(self, name: str) -> Any:
        number = self._adapters.setdefault(name, len(self._adapters) + 1)
        return importlib.import_module("vllm.lora.request").LoRARequest(name, number, str(self._exported(name)))

    def _exported(self, name: str) -> Path:
        """Return the folder of a model, exported once: a LoRA's files, any other model's without weights."""
        folder = Path(self._folder.name) / name.replace("/", "--")
        if not folder.exists():
            handle = self._zoo.model(name)
            handle.export(folder, for_engine=None if handle.kind == "lora" else "vllm")
        return folder

    def _shut_engine(self) -> None:
        """Shut down the engine's core, a process of its own, before the next one needs the memory."""
        if self._loaded is None:
            return
        engine = self._loaded[1].llm_engine
        self._loaded = None
        with contextlib.suppress(AttributeError):
            engine.engine_core.shutdown()
        del engine
        gc.collect()


def _rank(folder: Path) -> int:
    """Return the greatest rank of a PEFT folder."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return max(int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values()), 1)
