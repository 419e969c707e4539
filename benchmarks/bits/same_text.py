"""The same text alone and in company: chats of a real model, and against transformers by teacher forcing.

    python -m benchmarks.bits.same_text MODEL_FOLDER --chats 50 [--beside OTHER_FOLDER]

Alone: one chat after another. In company: all at once beside chats of two LoRAs of the model (random, of two ranks) and
of another model, with chunks of 48 tokens, prefix caching, and pages for a part of them, so that some are preempted.
Tokens and log-probabilities must be equal in every bit.

Against transformers in the same dtype: it reads each chat with our answer. Where its best token is not ours, its
logits of both must be closer than its own rounding: `--ulps` units in the last place of the larger one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cli.serving.driver import start_driver
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.types import SamplingParams, SequenceRequest
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.api import Zoo
from zoo.store import Store

TOPICS = ("rivers", "bread", "prime numbers", "the moon", "chess", "bees", "volcanoes", "paper", "glaciers", "music")
QUESTIONS = (
    "What are {}?", "Write a short poem about {}.", "Tell me three facts about {}.", "Why do people like {}?",
    "Explain {} to a child in a few sentences, and give one example.",
)  # fmt: skip
#: Rank and seed of the LoRAs beside.
LORAS = {"lora a": (8, 1), "lora b": (4, 2)}

#: Tokens and log-probabilities of a chat, with every bit.
Answer = tuple[tuple[int, str], ...]


def add_lora(store: Store, folder: Path, root: Path, name: str, rank: int, seed: int) -> None:
    """Store a LoRA with random weights on the model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=targets)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0.0, 0.02)
    model.save_pretrained(root / name)
    ingest(store, open_source(str(root / name)), name=name, base="model")


def chats_of(folder: Path, count: int) -> list[tuple[int, ...]]:
    """Return the token ids of `count` chats."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    asked = [question.format(topic) for question in QUESTIONS for topic in TOPICS][:count]
    turns = [[{"role": "user", "content": each}] for each in asked]
    return [tuple(tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]) for turn in turns]


def run_requests(
    zoo: Zoo, options: ServeOptions, names: Sequence[str], asked: Sequence[SequenceRequest], at_once: bool
) -> tuple[dict[str, Answer], int]:
    """Return the answers, and the number of preemptions."""
    got: dict[str, list[tuple[int, str]]] = {one.seq: [] for one in asked}
    with start_driver(zoo, options, Chosen(tuple(names), (), "paged")) as driver:
        for batch in [asked] if at_once else [[one] for one in asked]:
            for event in driver.run(batch):
                if event.error is not None:
                    raise RuntimeError(f"{event.seq}: {event.error}")
                if event.token is not None:
                    bits = " ".join(f"{one.token}:{one.logprob.hex()}" for one in event.top)
                    got[event.seq].append((event.token, bits))
        preemptions = driver.state().counters.preemptions
    return {seq: tuple(tokens) for seq, tokens in got.items()}, preemptions


@torch.inference_mode()
def check_transformers(
    folder: Path, chats: Sequence[tuple[int, ...]], answers: Sequence[Answer], ulps: float
) -> tuple[int, int, int]:
    """Return the tokens compared, those that transformers would not choose, and those beyond its rounding."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    compared = different = beyond = 0
    for chat, answer in zip(chats, answers, strict=True):
        tokens = [token for token, _ in answer]
        logits = model(torch.tensor([[*chat, *tokens]])).logits[0, len(chat) - 1 : -1]
        unit = torch.finfo(logits.dtype).eps
        for row, token in zip(logits.float(), tokens, strict=True):
            compared += 1
            best = float(row.max())
            gap = best - float(row[token])
            different += int(row.argmax()) != token
            beyond += gap > ulps * unit * abs(best)
    return compared, different, beyond


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--ulps", type=float, default=4.0)
    parser.add_argument("--kv-cache-memory-bytes", default="48MiB")
    parser.add_argument("--kernels", default="auto")
    asked = parser.parse_args()
    chats = chats_of(asked.folder, asked.chats)
    sampling = SamplingParams(asked.tokens, logprobs=5, ignore_eos=True)
    mine = [SequenceRequest(f"chat {n}", f"r{n}", "model", chat, sampling) for n, chat in enumerate(chats)]
    with tempfile.TemporaryDirectory() as root:
        store = Store.open(Path(root) / "store")
        ingest(store, open_source(str(asked.folder)), name="model")
        for name, (rank, seed) in LORAS.items():
            add_lora(store, asked.folder, Path(root), name, rank, seed)
        names = ["model", *LORAS]
        if asked.beside is not None:
            ingest(store, open_source(str(asked.beside)), name="beside")
            names.append("beside")
        store.close()
        others = [
            SequenceRequest(f"other {n}", f"o{n}", names[1 + n % (len(names) - 1)], chats[n % len(chats)], sampling)
            for n in range(len(chats) // 2)
        ]
        plain = ServeOptions(max_num_seqs=1, prefix_caching="off", max_model_len=1024, kernels=asked.kernels)
        crowded = replace(
            plain, max_num_seqs=128, prefix_caching="cached", max_num_batched_tokens=48,
            kv_cache_memory_bytes=asked.kv_cache_memory_bytes,
        )  # fmt: skip
        with Zoo(Path(root) / "store") as zoo:
            alone, _ = run_requests(zoo, plain, ["model"], mine, at_once=False)
            mixed = [one for pair in zip(mine, [*others, *mine], strict=False) for one in pair]
            both = list(dict.fromkeys(one.seq for one in mixed))
            known = {one.seq: one for one in (*mine, *others)}
            together, preemptions = run_requests(zoo, crowded, names, [known[seq] for seq in both], at_once=True)
    equal = sum(alone[one.seq] == together[one.seq] for one in mine)
    texts = sum([t for t, _ in alone[one.seq]] == [t for t, _ in together[one.seq]] for one in mine)
    print(f"{len(mine)} chats of {asked.tokens} tokens beside {len(others)} of {len(names) - 1} other models, "
          f"{preemptions} preemptions: {texts} with equal tokens, {equal} with equal bits")  # fmt: skip
    found = check_transformers(asked.folder, chats, [alone[one.seq] for one in mine], asked.ulps)
    print(f"transformers: {found[0]} tokens, {found[1]} that it would not choose, "
          f"{found[2]} of them beyond {asked.ulps:g} units in the last place of its best logit")  # fmt: skip
    if equal < len(mine) or found[2]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
