"""Switches of an alias under load with real models: every answer is one version's, to the last token."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.cli.test_serve import serving
from zoo import Zoo

SWITCHES, CLIENTS, LENGTH = 20, 3, 12
PROMPTS = ("def hello", "import os", "class A:")


def test_streams_over_switches_are_each_wholly_one_versions(store: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(store, tmp_path / "own"))
    stopped, answers = threading.Event(), list[tuple[str, set[str], str]]()
    with Zoo(own) as zoo, serving(own, tmp_path / "log") as served, served.client() as client:
        zoo.set_alias("prod", "org/base")

        def streamed(model: str, prompt: str) -> tuple[set[str], str]:
            chunks: list[Any] = list(
                client.completions.create(model=model, prompt=prompt, max_tokens=LENGTH, temperature=0, stream=True)
            )
            return {chunk.model for chunk in chunks}, "".join(chunk.choices[0].text for chunk in chunks)

        own_texts = {
            (name, prompt): streamed(name, prompt)[1] for name in ("org/base", "org/lora") for prompt in PROMPTS
        }
        assert own_texts["org/base", PROMPTS[0]] != own_texts["org/lora", PROMPTS[0]]

        def ask() -> None:
            while not stopped.is_set():
                for prompt in PROMPTS:
                    answers.append((prompt, *streamed("prod", prompt)))

        _wait_for(client, "org/base")
        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask) for _ in range(CLIENTS)]
            try:
                for at in range(SWITCHES):
                    name = ("org/lora", "org/base")[at % 2]
                    zoo.set_alias("prod", name)
                    _wait_for(client, name)
            finally:
                stopped.set()
            for each in asking:
                each.result()
    models = Counter(next(iter(found)) for _, found, _ in answers)
    assert models.keys() == {"org/base", "org/lora"} and min(models.values()) > 3, models
    for prompt, found, text in answers:
        (model,) = found
        assert text == own_texts[model, prompt]


def _wait_for(client: Any, name: str) -> None:
    """Wait until the server answers for `prod` with a model; at first it has not seen the alias."""
    end = time.monotonic() + 60
    while not any(card.id == "prod" and card.model_dump()["root"] == name for card in client.models.list()):
        assert time.monotonic() < end
        time.sleep(0.02)
