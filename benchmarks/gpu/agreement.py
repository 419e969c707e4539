"""Compare the engine's answers with transformers: every decode step, on the engine's own tokens.

A reference reads prompt and answer in one call and gives the log-probability of each token of the answer. A difference
at one step does not affect later ones, so every step is compared, in any dtype. In bfloat16 the engine may deviate from
the float32 reference about as far as transformers in bfloat16 does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu.isolation import RunSettings
from benchmarks.gpu.models import LORAS, folder_of, store_of
from benchmarks.gpu.stepping import Stepper
from runtime.config import EngineConfig, GraphChoice
from runtime.engine.attention.gathered import GatheredAttention
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.varlen import device_attention, device_page_tokens
from runtime.engine.step.context import PagedMetadata, RowSpan
from runtime.kv.pool import PagePool
from runtime.types import SamplingParams

#: Lengths of the prompts and tokens of each answer. Some prompts span pages and steps.
_PROMPTS, _ANSWER, _CHUNK = (3, 17, 64, 255, 300, 511), 24, 256
#: Largest difference of a log-probability in float32, and what bfloat16 may add to transformers' own error, doubled.
_FLOAT32, _BFLOAT16 = 5e-3, 0.05
_POOL = 256 << 20


def check_attention(settings: RunSettings) -> Mapping[str, Any]:
    """Compare the attention of this device, over pages of several sizes, with torch's own operations in float32."""
    device, worst = torch.device(settings.device), dict[str, float]()
    half = device.type == "cuda"
    sizes = {16, device_page_tokens(device, torch.bfloat16)}
    rows = [(0, 1), (5, 1), (255, 1), (256, 1), (700, 1), (0, 9), (300, 40), (0, 300)]
    for page_tokens in sorted(sizes):
        for how in (AttentionSettings(), AttentionSettings(window=33), AttentionSettings(softcap=20.0)):
            errors = []
            for some in (rows, rows[:5]):  # with chunks of prompts, and decode rows alone
                pages, query, key, value = _paged_rows(some, page_tokens, device, torch.bfloat16)
                outs = []
                for maker in (device_attention(device), GatheredAttention):
                    attention, like = maker(pages), torch.empty_like(query)
                    now = Tokens(query, key, value, how)
                    attention.write_kv(0, key, value)
                    like.fill_(float("nan"))
                    attention.decode(0, now, like)
                    attention.chunks(0, now, like)
                    outs.append(like.float())
                errors.append(float((outs[0] - outs[1]).norm() / outs[1].norm()))
            name = f"pages of {page_tokens}" + (" window" if how.window else " softcap" if how.softcap else "")
            worst[name] = max(errors)
    wrong = {name: error for name, error in worst.items() if not error < 2e-2}
    if wrong:
        raise AssertionError(f"attention deviates by {wrong}")
    return {"kernel": half and device_attention(device) is not GatheredAttention, "relative error": worst}


def check_float32(settings: RunSettings) -> Mapping[str, Any]:
    """Compare float32 answers, run module by module."""
    return _compare(settings, "float32", "off", ["compared"])


def check_bfloat16(settings: RunSettings) -> Mapping[str, Any]:
    """Compare bfloat16 answers, run module by module."""
    return _compare(settings, "bfloat16", "off", ["compared"])


def check_recorded_float32(settings: RunSettings) -> Mapping[str, Any]:
    """Compare float32 answers with decode steps recorded and replayed."""
    return _compare(settings, "float32", "on", ["compared"])


def check_recorded_bfloat16(settings: RunSettings) -> Mapping[str, Any]:
    """Compare bfloat16 answers with decode steps recorded and replayed."""
    return _compare(settings, "bfloat16", "on", ["compared"])


def check_lora_float32(settings: RunSettings) -> Mapping[str, Any]:
    """Compare float32 answers of a base and its LoRAs in one batch with peft's."""
    return _compare(settings, "float32", "off", ["compared", *_loras()])


def check_lora_bfloat16(settings: RunSettings) -> Mapping[str, Any]:
    """Compare bfloat16 answers of a base and its LoRAs in one batch, recorded, with peft's."""
    return _compare(settings, "bfloat16", "on", ["compared", *_loras()])


def _loras() -> list[str]:
    return [f"compared-lora{number}" for number in range(LORAS)]


def _compare(settings: RunSettings, dtype: str, graphs: GraphChoice, names: Sequence[str]) -> Mapping[str, Any]:
    """Run answers of all models in one batch and compare each with its reference. Raises AssertionError."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = EngineConfig(
        device=settings.device, kv_cache_memory_bytes=_POOL, dtype=dtype, graphs=graphs, kernels="stock"
    )
    longest = 128 if settings.small else max(_PROMPTS)
    draws = random.Random(0)
    prompts = {
        f"{name}/{length}": (name, [draws.randrange(3, 250) for _ in range(length)])
        for name in names
        for length in _PROMPTS
        if length <= longest
    }
    with store_of(settings) as store:
        stepper = Stepper(store, config, names)
        stepper.start(prompts, SamplingParams(_ANSWER, logprobs=0, ignore_eos=True), _CHUNK)
        stepper.decode(_ANSWER // 2)
        stepper.decode_ahead(_ANSWER - _ANSWER // 2)
        answers = {seq: stepper.tokens_of(seq) for seq in prompts}
        recorded = _recordings(stepper)
    del stepper
    ours = theirs = 0.0
    for name in names:
        own = [seq for seq in prompts if prompts[seq][0] == name]
        asked = [(prompts[seq][1], [one.token for one in answers[seq]]) for seq in own]
        exact = _scores(settings, name, torch.float32, asked)
        told = [[one.logprob or 0.0 for one in answers[seq]] for seq in own]
        ours = max(ours, _distance(told, exact))
        if dtype != "float32":
            theirs = max(theirs, _distance(_scores(settings, name, getattr(torch, dtype), asked), exact))
    limit = _FLOAT32 if dtype == "float32" else 2 * theirs + _BFLOAT16
    if not ours <= limit:
        raise AssertionError(f"log-probabilities deviate by {ours:.3g}, more than {limit:.3g}")
    if graphs == "on" and (recorded["refused"] or not recorded["replayed"]):
        raise AssertionError(f"decode steps were not replayed: {recorded}")
    values: dict[str, Any] = {"largest difference": ours, "limit": limit, "sequences": len(prompts)}
    return values | ({"graphs": recorded} if graphs == "on" else {})


def _recordings(stepper: Stepper) -> dict[str, int]:
    graphs = stepper.engine.recordings
    return {} if graphs is None else {
        "recorded": graphs.recorded, "replayed": graphs.replayed, "refused": graphs.refused
    }  # fmt: skip


@torch.inference_mode()
def _scores(
    settings: RunSettings, name: str, dtype: torch.dtype, asked: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[list[float]]:
    """Return the reference's log-probabilities of the answers' tokens."""
    from transformers import AutoModelForCausalLM

    base = name.partition("-lora")[0]
    model: Any = AutoModelForCausalLM.from_pretrained(folder_of(settings, base), dtype=dtype)
    if name != base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder_of(settings, name)))
    model = model.to(settings.device).eval()
    scores = []
    for prompt, answer in asked:
        logits = model(torch.tensor([[*prompt, *answer]], device=settings.device)).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(answer, device=settings.device)[:, None]
        scores.append(torch.log_softmax(logits.float(), dim=-1).gather(1, chosen)[:, 0].tolist())
    return scores


def _distance(some: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the largest difference; infinity for anything that is not finite."""
    worst = 0.0
    for one, two in zip(some, other, strict=True):
        for x, y in zip(one, two, strict=True):
            worst = max(worst, abs(x - y) if abs(x - y) < float("inf") else float("inf"))
    return worst


def _paged_rows(
    rows: Sequence[tuple[int, int]], page_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[PagedMetadata, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the paging of rows (tokens before the step, tokens in it) with random K and V, and random q, k, v."""
    torch.manual_seed(0)
    heads, kv_heads, width = 8, 2, 64
    groups = [-(-(before + count) // page_tokens) for before, count in rows]
    half = page_tokens * kv_heads * width * dtype.itemsize
    pool = PagePool(2 * half * sum(groups), half, str(device))
    ids = iter(torch.randperm(sum(groups)).tolist())
    tables = torch.full((len(rows), 1, max(groups)), pool.padding)
    spans, at = [], 0
    for row, (before, count) in enumerate(rows):
        tables[row, 0, : groups[row]] = torch.tensor([next(ids) for _ in range(groups[row])])
        spans.append(RowSpan(at, at + count, before))
        at += count
    places = torch.tensor([p for span in spans for p in range(span.start, span.length)])
    row_of = torch.tensor([i for i, span in enumerate(spans) for _ in range(span.hi - span.lo)])
    made = PagedMetadata(
        pool, page_tokens, None, tuple(spans), tables.to(device),
        torch.tensor([span.length for span in spans], device=device),
        tables[row_of, :, places // page_tokens].t().contiguous().to(device), (places % page_tokens).to(device),
    )  # fmt: skip
    query = torch.randn(at, heads, width, device=device, dtype=dtype)
    key, value = torch.randn(2, at, kv_heads, width, device=device, dtype=dtype)
    view = made.view(key)
    for half_pool in (view.k, view.v):
        half_pool[: pool.pages].normal_()
    return made, query, key, value
