"""Make checkpoints in Meta's original layout from tiny Hugging Face ones, and run Meta's own arithmetic on them.

`write_meta` undoes what an ingest does (names, rotary layout, shards); `reference_logits` is Meta's model in a few
lines, with rotary angles on interleaved pairs as complex numbers: an oracle that shares no code with transformers.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.checkpoints import build

RANKS = 304
SPECIALS = 256
SENTENCES = (
    "hello world",
    "  two leading spaces",
    "Café déjà vu, naïve façade",
    "emoji 🙂 and 👩‍👩‍👧 families",
    "line\nbreak\n\n  indented",
    "a  b   c\td",
    "12345 + 678",
    "def f(x):\n    return x\n",
    "日本語 テスト",
    " ",
    "",
)


@functools.lru_cache(maxsize=1)
def _text() -> str:
    return Path(functools.__file__).read_text()


@functools.lru_cache(maxsize=1)
def sentencepiece_model(size: int = 600) -> bytes:
    """Return a BPE model with byte fallback, trained with the settings of Llama 2's."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_text().splitlines()),
        model_writer=model,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@functools.lru_cache(maxsize=1)
def tiktoken_ranks() -> dict[bytes, int]:
    """Return ranks: all bytes, then the most frequent pairs of a text, merged greedily."""
    words = Counter(bytes(word, "utf-8") for word in (" " + _text()).replace("\n", " \n ").split(" ") if word)
    pieces = {word: [bytes([byte]) for byte in b" " + word] for word in words}
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < RANKS:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in pieces.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = len(ranks)
        pieces = {word: _merge(parts, left, right) for word, parts in pieces.items()}
    return ranks


def _merge(parts: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    merged: list[bytes] = []
    for part in parts:
        if merged and merged[-1] == left and part == right:
            merged[-1] = left + right
        else:
            merged.append(part)
    return merged


def tiktoken_file() -> bytes:
    """Return the ranks in the format that Meta ships."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in tiktoken_ranks().items())


def tiny_llama(**overrides: Any) -> Any:
    """Return a random transformers Llama that fits Meta's arithmetic and the tokenizer above."""
    shape = {"intermediate_size": 192, "vocab_size": 600, "rms_norm_eps": 1e-5, "num_attention_heads": 8}
    return build("llama", **{**shape, **overrides})


def params_of(config: Any, **extra: Any) -> dict[str, Any]:
    """Return `params.json` for a config with FFN width 192 = 32 * ceil(int(8 * 64 / 3) / 32)."""
    return {
        "dim": config.hidden_size,
        "multiple_of": 32,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "n_layers": config.num_hidden_layers,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
        **extra,
    }


def meta_state(model: Any) -> dict[str, Any]:
    """Return a transformers Llama's tensors under Meta's names, q and k in Meta's rotary order."""
    config = model.config
    state = {key: value.detach() for key, value in model.state_dict().items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    meta = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        meta[ours + "attention.wq.weight"] = _interleaved(state[theirs + "self_attn.q_proj.weight"], heads)
        meta[ours + "attention.wk.weight"] = _interleaved(state[theirs + "self_attn.k_proj.weight"], kv_heads)
        for name, key in {
            "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        }.items():  # fmt: skip
            meta[f"{ours}{name}.weight"] = state[f"{theirs}{key}.weight"]
    return meta


def _interleaved(weight: Any, heads: int) -> Any:
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def shard_states(state: dict[str, Any], count: int, embedding: str) -> list[dict[str, Any]]:
    """Split the tensors for model parallelism as Meta does."""
    import torch

    def part(name: str, tensor: Any, number: int) -> Any:
        kind = name.split(".")[-2]
        if "norm" in kind:
            return tensor
        columns = kind in ("wo", "w2") or (kind == "tok_embeddings" and embedding == "columns")
        return tensor.chunk(count, dim=1 if columns else 0)[number].contiguous().clone()

    shards = [{name: part(name, tensor, number) for name, tensor in state.items()} for number in range(count)]
    for shard in shards:
        shard["rope.freqs"] = torch.zeros(4)
    return shards


def write_meta(
    model: Any,
    folder: Path,
    *,
    shards: int = 1,
    embedding: str = "columns",
    tokenizer: bytes | None = None,
    **params: Any,
) -> Path:
    """Write a model in Meta's layout.

    `params` are added to params.json; the tokenizer is SentencePiece's unless given.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params_of(model.config, **params)))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model() if tokenizer is None else tokenizer)
    (folder / "LICENSE.txt").write_text("a licence")
    (folder / "checklist.chk").write_text("sums")
    for number, state in enumerate(shard_states(meta_state(model), shards, embedding)):
        torch.save(state, folder / f"consolidated.{number:02d}.pth")
    return folder


def write_source(source: Any, folder: Path, chunk: int = 1000) -> Path:
    """Write a source as the folder that an export of it gives.

    A small odd chunk size tests that chunks need not be whole rows.
    """
    for weights in source.weights:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / weights.path).open("wb") as file:
            file.write(weights.header)
            for tensor in weights.tensors:
                for data in tensor.chunks(chunk):
                    assert len(data) <= chunk
                    file.write(data)
    for side in source.sides:
        (folder / side.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / side.path).write_bytes(side.data)
    return folder


def reference_logits(state: dict[str, Any], config: Any, tokens: list[int]) -> Any:
    """Return the logits [T, vocab] of Meta's model, from unsharded tensors in Meta's layout."""
    import torch

    heads, kv_heads, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size // config.num_attention_heads,
    )
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, width, 2).float() / width))
    angles = torch.outer(torch.arange(len(tokens)).float(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None, :]

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * state[name]

    def rotated(x: Any) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(2)

    hidden = state["tok_embeddings.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        x = norm(hidden, at + "attention_norm.weight")
        q = rotated((x @ state[at + "attention.wq.weight"].T).view(len(tokens), heads, width))
        k = rotated((x @ state[at + "attention.wk.weight"].T).view(len(tokens), kv_heads, width)).repeat_interleave(
            heads // kv_heads, 1
        )
        v = (
            (x @ state[at + "attention.wv.weight"].T)
            .view(len(tokens), kv_heads, width)
            .repeat_interleave(heads // kv_heads, 1)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
        scores = scores.masked_fill(torch.ones(len(tokens), len(tokens)).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(tokens), -1)
        hidden = hidden + mixed @ state[at + "attention.wo.weight"].T
        x = norm(hidden, at + "ffn_norm.weight")
        gate, up = (x @ state[at + f"feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ state[at + "feed_forward.w2.weight"].T
    return norm(hidden, "norm.weight") @ state["output.weight"].T
