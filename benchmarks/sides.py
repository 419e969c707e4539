"""One engine as a process of its own that answers orders, so that engines with packages of their own can be measured in turns.

    PYTHON sides.py zoo STORE MODEL | vllm CHECKPOINT | transformers CHECKPOINT  [--threads N] [--dtype D] [--kv-bytes B] [--eager]

Orders are lines of JSON on stdin: `{"prompts": [[ids]…], "tokens": n}`, all answered at once, greedily, each with n tokens whatever they
are. Answers are lines on stdout: `{"seconds", "digest", "resident"}`; a first one, after a prompt of the engine's own, says that it is ready.
`resident`: bytes of this process and those it started. It must run where only its own engine is installed: nothing else is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

#: Prompts and the number of tokens to answer each with -> the answers.
Answering = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


def zoo(args: argparse.Namespace) -> Answering:
    """Our engine, its agent and its driver."""
    import torch

    from runtime.cluster.local import LocalDriver
    from runtime.config import BatchingConfig, EngineConfig
    from runtime.engine.paged import PagedEngine
    from runtime.types import SamplingParams, SequenceRequest
    from zoo.store import Store

    torch.set_num_threads(args.threads)
    store = Store.open(Path(args.what[0]))
    name = args.what[1]
    engine = PagedEngine(store, EngineConfig(kv_bytes=args.kv_bytes, dtype=args.dtype), [name])
    driver = LocalDriver(engine, BatchingConfig(token_budget=2048))
    numbers = count()

    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        requests = [SequenceRequest(str(next(numbers)), "r", name, tuple(prompt), params) for prompt in prompts]
        outputs: dict[str, list[int]] = {one.seq: [] for one in requests}
        for event in driver.run(requests):
            if event.token is not None:
                outputs[event.seq].append(event.token)
        return list(outputs.values())

    return answer


def vllm(args: argparse.Namespace) -> Answering:
    """vLLM's offline API."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=args.what[0], dtype=args.dtype, enforce_eager=args.eager, skip_tokenizer_init=True, max_num_seqs=256,
        max_num_batched_tokens=2048, enable_prefix_caching=False,
    )  # fmt: skip

    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        made = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in made]

    return answer


def transformers(args: argparse.Namespace) -> Answering:
    """transformers' `generate`; the prompts have one length."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.what[0], dtype=getattr(torch, args.dtype)).eval()

    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        out: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return out

    return answer


SIDES: dict[str, Callable[[argparse.Namespace], Answering]] = {"zoo": zoo, "vllm": vllm, "transformers": transformers}


def resident(pid: int) -> int:
    """Bytes that a process and those it started hold, pages that several of them share once."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total + sum(resident(child) for child in _children(pid))


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def digest(answers: Iterable[Sequence[int]]) -> list[str]:
    """A short name per answer, to compare sides by."""
    return [hashlib.sha256(json.dumps(list(answer)).encode()).hexdigest()[:12] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("side", choices=tuple(SIDES))
    parser.add_argument("what", nargs="+")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    # Engines print as they like: what we say goes to the stdout that we were given, what they say to stderr.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer = SIDES[args.side](args)
    answer([[5, 6, 7, 8]], 1)
    print(json.dumps({"resident": resident(os.getpid())}), file=out)
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.perf_counter()
        answers = answer(order["prompts"], order["tokens"])
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "digest": digest(answers), "resident": resident(os.getpid())}), file=out)


if __name__ == "__main__":
    main()
