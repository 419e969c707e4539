"""One engine in its own process, controlled by orders, so that engines with different packages can be measured in turn.

    PYTHON sides.py zoo STORE MODEL… | vllm CHECKPOINT [NAME=ADAPTER…] | transformers CHECKPOINT | openvino EXPORTED
        [--threads N] [--dtype D] [--kv-cache-memory-bytes B] [--eager] [--rank R]

Orders are JSON lines on stdin: `{"prompts": [[ids]…], "tokens": n or [n…], "models": [name…], "at": [seconds…]}`. They
are answered greedily, each with exactly the given number of tokens.

- `models`: a stored model for zoo, an adapter for vLLM; default: the first model, or the checkpoint.
- `at`: when each request starts, from the start of the order; default: all at once.
- transformers supports neither, and needs prompts and answers of one length; OpenVINO GenAI supports neither.

Answers are JSON lines on stdout: `{"seconds", "ended", "digest", "resident"}`. `ended` is when each request had its
last token, `resident` the bytes of this process and its children. A first line, after a prompt of the engine's own,
means that the process is ready. Nothing but the side's own engine is imported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Wanted:
    """A request.

    Fields:
        tokens: Length of the answer.
        model: None for the side's own.
        at: Seconds from the start of the order.
    """

    prompt: Sequence[int]
    tokens: int
    model: str | None = None
    at: float = 0.0


@dataclass(frozen=True)
class Made:
    """An answer.

    Fields:
        ended: When the last token was there, by `time.perf_counter`.
    """

    tokens: list[int]
    ended: float


#: Requests in the order of their start -> their answers.
Answering = Callable[[Sequence[Wanted]], list[Made]]


def zoo(args: argparse.Namespace) -> Answering:
    """Return the function that runs requests on Block Zoo's engine through its driver, with the settings of `zoo`."""
    from runtime.processors import prepare_openmp

    prepare_openmp()
    import torch

    from cli.serving.models import Chosen
    from cli.serving.one_device import start_one_device
    from runtime.config import EngineConfig
    from runtime.types import SamplingParams, SequenceRequest, TokenEvent
    from zoo.api import Zoo

    torch.set_num_threads(args.threads)
    names = args.what[1:]
    config = EngineConfig(kv_cache_memory_bytes=args.kv_cache_memory_bytes, dtype=args.dtype)
    driver = start_one_device(
        Zoo(Path(args.what[0])), config, Chosen(tuple(names), ()), max_num_batched_tokens=2048, prefix_caching="off"
    )
    numbers = count()

    def request(one: Wanted) -> SequenceRequest:
        name = str(next(numbers))
        params = SamplingParams(max_tokens=one.tokens, ignore_eos=True)
        return SequenceRequest(name, name, one.model or names[0], tuple(one.prompt), params)

    async def streamed(requests: Sequence[SequenceRequest], due: float, hear: Callable[[TokenEvent], None]) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        async with driver.open_stream(requests) as stream:
            async for events in stream:
                for event in events:
                    hear(event)

    async def together(
        groups: Sequence[tuple[float, list[SequenceRequest]]], hear: Callable[[TokenEvent], None]
    ) -> None:
        begin = time.perf_counter()
        await asyncio.gather(*(streamed(requests, begin + at, hear) for at, requests in groups))

    def answer(wanted: Sequence[Wanted]) -> list[Made]:
        groups = [(at, [request(one) for one in of]) for at, of in groupby(wanted, key=lambda one: one.at)]
        tokens: dict[str, list[int]] = {one.seq: [] for _, of in groups for one in of}
        ended = dict.fromkeys(tokens, 0.0)

        def hear(event: TokenEvent) -> None:
            if event.finish in ("error", "abort"):
                raise RuntimeError(f"a request failed: {event.error or 'aborted'}")
            if event.token is not None:
                tokens[event.seq].append(event.token)
                ended[event.seq] = time.perf_counter()

        if len(groups) > 1:
            asyncio.run(together(groups, hear))
        else:
            for event in driver.run(groups[0][1]):
                hear(event)
        return [Made(tokens[name], ended[name]) for name in tokens]

    return answer


def vllm(args: argparse.Namespace) -> Answering:
    """Return the function that runs requests on vLLM's offline engine, stepped as its `generate` does."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    pairs = [one.split("=", 1) for one in args.what[1:]]
    adapters = {name: LoRARequest(name, number, folder) for number, (name, folder) in enumerate(pairs, 1)}
    room = (
        {"enable_lora": True, "max_loras": len(pairs), "max_cpu_loras": len(pairs), "max_lora_rank": args.rank}
        if pairs
        else {}
    )
    engine = LLM(
        model=args.what[0], dtype=args.dtype, enforce_eager=args.eager, skip_tokenizer_init=True, max_num_seqs=256,
        max_num_batched_tokens=2048, enable_prefix_caching=False, **room,
    ).llm_engine  # fmt: skip
    numbers = count()

    def add(one: Wanted) -> str:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=one.tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(next(numbers))
        engine.add_request(
            name, {"prompt_token_ids": list(one.prompt)}, params, lora_request=adapters.get(one.model or "")
        )
        return name

    def answer(wanted: Sequence[Wanted]) -> list[Made]:
        begin = time.perf_counter()
        waiting, made = deque(wanted), dict[str, Made]()
        order: list[str] = []
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0].at <= time.perf_counter() - begin:
                order.append(add(waiting.popleft()))
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0].at - (time.perf_counter() - begin)))
                continue
            for output in engine.step():
                if output.finished:
                    made[output.request_id] = Made(list(output.outputs[0].token_ids), time.perf_counter())
        return [made[name] for name in order]

    return answer


def transformers(args: argparse.Namespace) -> Answering:
    """Return the function that runs requests with transformers' `generate`.

    It raises ValueError for unsupported orders.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.what[0], dtype=getattr(torch, args.dtype)).eval()

    def answer(wanted: Sequence[Wanted]) -> list[Made]:
        if len({(len(one.prompt), one.tokens) for one in wanted}) > 1 or any(one.model or one.at for one in wanted):
            raise ValueError("transformers takes one model and one length, all at once")
        ids, tokens = torch.tensor([one.prompt for one in wanted]), wanted[0].tokens
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        now = time.perf_counter()
        return [Made(row, now) for row in made[:, ids.shape[1] :].tolist()]

    return answer


def openvino(args: argparse.Namespace) -> Answering:
    """Return the function that runs requests on OpenVINO GenAI's continuous batching, K and V in the given dtype.

    It raises ValueError for unsupported orders.
    """
    import numpy as np
    import openvino as ov
    import openvino_genai as og

    scheduler = og.SchedulerConfig()
    scheduler.cache_size = max(1, args.kv_cache_memory_bytes >> 30)
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.dynamic_split_fuse = 2048, 256, True
    precision = {"float32": "f32", "bfloat16": "bf16"}[args.dtype]
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": args.threads,
    }
    pipe = og.ContinuousBatchingPipeline(args.what[0], scheduler, "CPU", options)

    def config(one: Wanted) -> object:
        made = og.GenerationConfig()
        made.max_new_tokens, made.ignore_eos, made.do_sample = one.tokens, True, False
        return made

    def answer(wanted: Sequence[Wanted]) -> list[Made]:
        if any(one.model or one.at for one in wanted):
            raise ValueError("OpenVINO takes one model, all at once")
        prompts = [ov.Tensor(np.array([one.prompt], dtype=np.int64)) for one in wanted]
        answers = pipe.generate(prompts, [config(one) for one in wanted])
        now = time.perf_counter()
        return [Made(list(each.m_generation_ids[0]), now) for each in answers]

    return answer


SIDES: dict[str, Callable[[argparse.Namespace], Answering]] = {
    "zoo": zoo,
    "vllm": vllm,
    "transformers": transformers,
    "openvino": openvino,
}


def wanted_of(order: Mapping[str, Any]) -> list[Wanted]:
    """Return an order's requests. Raises ValueError unless its lists have equal lengths."""
    prompts = order["prompts"]
    tokens = order["tokens"] if isinstance(order["tokens"], list) else [order["tokens"]] * len(prompts)
    models, at = order.get("models") or [None] * len(prompts), order.get("at") or [0.0] * len(prompts)
    return [Wanted(*row) for row in zip(prompts, tokens, models, at, strict=True)]


def resident(pid: int) -> int:
    """Return the bytes that a process and its children hold; pages that several share count once."""
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
    """Return a short hash per answer, to compare sides."""
    return [hashlib.sha256(json.dumps(list(answer)).encode()).hexdigest()[:12] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("side", choices=tuple(SIDES))
    parser.add_argument("what", nargs="+")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rank", type=int, default=8, help="of vLLM's adapters")
    args = parser.parse_args()
    # Engines may print to stdout: answers go to the original stdout, everything else to stderr.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer = SIDES[args.side](args)
    answer([Wanted([5, 6, 7, 8], 1)])
    print(json.dumps({"resident": resident(os.getpid())}), file=out)
    for line in sys.stdin:
        wanted = wanted_of(json.loads(line))
        begin = time.perf_counter()
        made = answer(wanted)
        seconds = time.perf_counter() - begin
        said = {
            "seconds": seconds,
            "ended": [one.ended - begin for one in made],
            "digest": digest(one.tokens for one in made),
            "resident": resident(os.getpid()),
        }
        print(json.dumps(said), file=out)


if __name__ == "__main__":
    main()
