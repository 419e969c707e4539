"""Train foundations of increasing similarity: wide models distilled from a narrow one for longer and longer.

    python -m benchmarks.surgery.alike --teacher DIR --output DIR --tokens 250000 [--tokens 1000000 …]
        [--hidden 256 --layers 4 --ffn 512 --heads 8] [--start sliced] [--rate R --matrix-rate R] [--autocast]

Two foundations trained on a few hundred thousand tokens agree far less than the papers' 7B and 13B, and a stitched
chain cannot agree more with its second model than the two models' knowledge allows. Here only the similarity of a pair
varies: the wide model starts from random weights and learns the teacher's next-token distributions.

`python -m benchmarks.surgery.stitching` then takes each pair. Its curve of stitched similarity over the foundations'
similarity separates the stitch's loss from that of the family. The text is the training part of the standard library,
as in `zoo demo`; similarity is measured on the held-out part.

With `--start sliced` the model is narrower than the teacher and starts from its layers (`benchmarks.surgery.sliced`),
because random weights learn little from a real teacher within minutes; --ffn and --heads are the teacher's own then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.surgery.sliced import sliced_student
from cli.demo.members import quiet_transformers
from cli.demo.optim import Muon
from cli.demo.train import batches, perplexity, rate_factor
from surgery.text.library import EVERYTHING, read_library

_CONTEXT, _BATCH = 256, 8
_RATE, _MATRIX_RATE = 8e-3, 2e-2
_MEASURED = 48
#: Windows on which a sliced start finds its directions.
_SLICED_ON = 16


def tokens_of(folder: Path, part: str) -> Tensor:
    """Return a part of the library's text as one stream of the teacher's tokens, int64."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = getattr(read_library().slice(EVERYTHING), part)
    return torch.tensor(
        [token for encoding in tokenizer.encode_batch(list(texts)) for token in encoding.ids], dtype=torch.int64
    )


def student_of(teacher: Any, hidden: int, layers: int, ffn: int, heads: int, seed: int) -> Any:
    """Return a Llama of another width with random weights and the teacher's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=teacher.config.vocab_size,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=teacher.config.max_position_embeddings,
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=teacher.config.bos_token_id,
        eos_token_id=teacher.config.eos_token_id,
        pad_token_id=teacher.config.pad_token_id,
    )
    return LlamaForCausalLM(config)


def teach_(
    student: Any, teacher: Any, stream: Tensor, tokens: int, seed: int, rates: tuple[float, float], autocast: bool
) -> None:
    """Train the student in place on the teacher's distributions: KL(teacher, student), mean over tokens.

    Args:
        rates: Peak learning rates of AdamW and, for the layers' matrices, Muon.
        autocast: Compute products in bfloat16; weights stay float32.
    """
    matrices = [p for name, p in student.named_parameters() if p.dim() == 2 and ".layers." in name]
    chosen = set(map(id, matrices))
    rest = [p for p in student.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.AdamW(rest, lr=rates[0], betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        Muon(matrices, lr=rates[1]),
    ]
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    steps, begin = max(1, tokens // (_CONTEXT * _BATCH)), time.monotonic()
    student.train()
    for step, ids in zip(range(steps), batches(stream, _CONTEXT, _BATCH, seed), strict=False):
        for group, peak in peaks:
            group["lr"] = peak * rate_factor(step, steps)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            with torch.no_grad():
                wanted = teacher(input_ids=ids, use_cache=False).logits
            given = student(input_ids=ids, use_cache=False).logits
        wanted, given = (each.flatten(0, 1).float().log_softmax(-1) for each in (wanted, given))
        loss = F.kl_div(given, wanted, reduction="batchmean", log_target=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            print(
                f"  {step + 1} of {steps} steps, {time.monotonic() - begin:.0f} s, KL {float(loss.detach()):.3f}",
                flush=True,
            )
    student.eval()


@torch.no_grad()
def likeness(first: Any, second: Any, windows: Tensor) -> float:
    """Return the cosine of the two models' next-token distributions, mean over tokens (BL-05)."""
    total = 0.0
    for part in windows.split(8):
        a, b = (model(input_ids=part, use_cache=False).logits.softmax(-1) for model in (first, second))
        total += float(F.cosine_similarity(a, b, dim=-1).double().sum())
    return total / windows.numel()


def started(teacher: Any, stream: Tensor, args: argparse.Namespace) -> Any:
    """Return the student that the arguments ask for, before its training."""
    if args.start == "random":
        return student_of(teacher, args.hidden, args.layers, args.ffn, args.heads, args.seed)
    windows = stream.unfold(0, _CONTEXT, _CONTEXT)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(args.seed))[:_SLICED_ON]
    return sliced_student(teacher, args.hidden, args.layers, windows[chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description="Foundations that are more and more alike.")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of a Llama with its tokenizer")
    parser.add_argument(
        "--output", type=Path, required=True, help="where the models go, each in a folder named after its tokens"
    )
    parser.add_argument("--tokens", type=int, action="append", required=True)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--start", choices=("random", "sliced"), default="random", help="the student's first weights")
    parser.add_argument("--rate", type=float, default=_RATE, help="of AdamW")
    parser.add_argument("--matrix-rate", type=float, default=_MATRIX_RATE, help="of Muon, for the layers' matrices")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 products in training")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    from transformers import LlamaForCausalLM

    quiet_transformers()
    teacher: Any = LlamaForCausalLM.from_pretrained(args.teacher, dtype=torch.float32).eval()
    train, held_out = (tokens_of(args.teacher, part) for part in ("train", "held_out"))
    windows = held_out.unfold(0, _CONTEXT, _CONTEXT)[:_MEASURED]
    print(
        f"{len(train)} tokens to learn from; the teacher's perplexity is "
        f"{perplexity(teacher, held_out, _CONTEXT, _MEASURED):.1f}"
    )
    for tokens in args.tokens:
        begin = time.monotonic()
        student = started(teacher, train, args)
        begun = likeness(student, teacher, windows)
        teach_(student, teacher, train, tokens, args.seed, (args.rate, args.matrix_rate), args.autocast)
        folder = args.output / f"twin-{tokens}"
        student.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(args.teacher / name, folder / name)
        facts = {
            "tokens": tokens,
            "seconds": round(time.monotonic() - begin),
            "likeness_at_start": begun,
            "likeness": likeness(student, teacher, windows),
            "perplexity": perplexity(student, held_out, _CONTEXT, _MEASURED),
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
