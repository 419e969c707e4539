"""A model's profile: every block, surrogate, pair and link is measured, stored, and read back as tables.

No measured value is judged.
"""

from __future__ import annotations

import json

import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine.catalog.block_profiles import measured_pieces
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.models.registry import half_page
from runtime.engine.profiling.document import KIND, profile_model, stored_profiles
from runtime.engine.profiling.measure import MeasuredExtent, Workbench, tensors_of
from runtime.policy.profiles import BlockProfile, chain_of, profile_of
from tests import checkpoints
from tests.chains import put_chain, put_stitch
from tests.surgery.deltas.tunes import tune
from zoo.errors import InputError, NotServable
from zoo.records import Document, Equivalence, ScoredRun

EXTENT = MeasuredExtent((1, 3), (8, 40), (8, 24))
CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 24, page_tokens=8)


def test_all_blocks_of_a_chain_are_measured_and_kept(bench):
    base = bench.family("llama", "profiled")
    lora = bench.lora(base, "profiled-lora", target_modules=["model.layers.1.self_attn.q_proj"])
    seen = []
    document = profile_model(bench.store, lora, CONFIG, EXTENT, lambda done, total: seen.append((done, total)))
    with bench.store.catalog.reading() as reader:
        manifest, chain = reader.model(lora), reader.chain(lora)
    assert [block["block"] for block in document["blocks"]] == [block.digest for block in chain] and len(chain) > 1
    assert seen == [(done + 1, len(chain)) for done in range(len(chain))]
    for block, placed in zip(document["blocks"], chain, strict=True):
        assert list(block["batch"]) == ["1", "3"] and list(block["prefill"]) == ["8", "24"]
        assert block["components"] == [placed.lo, placed.hi]
        decode = [seconds for row in block["decode"]["seconds"] for seconds in row]
        figures = [*decode, *block["prefill"].values(), block["load_seconds"]]
        assert all(seconds > 0 for seconds in figures)
    metas = {tensor.digest: tensor.nbytes for tensor in manifest.tensors}
    held = [tensors_of(manifest, block.lo, block.hi) for block in chain]
    assert [block["bytes"] for block in document["blocks"]] == [
        sum(metas[digest] for digest in digests) for digests in held
    ]
    assert {digest for digests in held for digest in digests} == set(metas)  # including the adapter's digests
    assert {(link["a"], link["b"]) for link in document["links"]} == {("host", "host"), ("host", "process")}
    assert len(document["pairs"]) == len(chain) - 1 and all(pair["together"] > 0 for pair in document["pairs"])
    assert stored_profiles(bench.store, lora) == [json.loads(json.dumps(document))]
    profile = profile_of(document)
    assert profile.block(chain[0].digest).decode.at(3, 40) >= profile.block(chain[0].digest).decode.at(1, 8)


def test_measured_again_it_takes_the_old_ones_place(bench):
    name = bench.family("gpt2", "again")
    first = profile_model(bench.store, name, CONFIG, MeasuredExtent((1,), (4,), (4,)))
    second = profile_model(bench.store, name, CONFIG, EXTENT)
    assert first["key"] == second["key"] and stored_profiles(bench.store, name) == [json.loads(json.dumps(second))]


def test_surrogates_stand_beside_what_they_stand_for(bench):
    name = bench.family("llama", "parent")
    other = bench.add("stand-in", tune("llama", bench.root / "hf" / "stand-in"), base=name)
    with bench.store.catalog.writing() as writer:
        writer.put_equivalences(
            [Equivalence("surrogate", ScoredRun(name, 3, 5), ScoredRun(other, 3, 5), "e" * 64, 0.9)]
        )
    document = profile_model(bench.store, name, CONFIG, EXTENT)
    surrogate = document["blocks"][-1]
    assert (surrogate["model"], surrogate["components"], surrogate["layers"]) == (other, [3, 5], [1, 2])
    assert profile_of(document).blocks[-1].stands_for == surrogate["surrogate_of"] != surrogate["block"]


def test_composed_chains_are_measured_whatever_their_widths(bench):
    """Two models of different width with a stitch: all blocks are measured in order, read back as one chain."""
    narrow, wide = (
        bench.family("llama", "narrow"),
        bench.family("llama", "wide", hidden_size=96, num_attention_heads=6, head_dim=16),
    )
    put_stitch(bench.store, narrow, wide)
    for name, parts in {
        "stitched": ((narrow, 0, 2), (wide, 1, 3)),
        "repeated": ((narrow, 0, 2), (narrow, 1, 3)),
    }.items():
        put_chain(bench.store, name, *parts)
        document = profile_model(bench.store, name, CONFIG, EXTENT)
        with bench.store.catalog.reading() as reader:
            chain = reader.chain(name)
        assert [block["block"] for block in document["blocks"]] == [block.digest for block in chain]
        assert all(seconds > 0 for block in document["blocks"] for row in block["decode"]["seconds"] for seconds in row)
        whole = chain_of(profile_of(document), name, [block.digest for block in chain])
        assert whole.nbytes == sum(block["bytes"] for block in document["blocks"])
        cost = {block["block"]: block["decode"]["seconds"][1][1] for block in reversed(document["blocks"])}
        assert whole.decode.seconds[1][1] == pytest.approx(
            sum(cost[block.digest] for block in chain)
        )  # a block that occurs twice is counted once


def test_a_stitch_alone_is_refused_in_words(bench):
    a, b = (
        bench.family("llama", "one"),
        bench.family("llama", "two", hidden_size=96, num_attention_heads=6, head_dim=16),
    )
    with pytest.raises(NotServable, match="is a stitch, not a model"):
        profile_model(bench.store, put_stitch(bench.store, a, b), CONFIG, EXTENT)


def test_a_stored_profile_is_of_this_device_and_these_blocks(bench, monkeypatch):
    name = bench.family("llama", "of here", hidden_size=128, num_attention_heads=8, head_dim=16)
    found = describe_chain(bench.store, name, CONFIG, half_page(bench.store, CONFIG, [name]), 1 << 62)

    def measured(threads: int = torch.get_num_threads()) -> tuple[BlockProfile, ...]:
        return measured_pieces(bench.store, {name: found.chain}, "cpu", threads)

    assert not measured()
    document = profile_model(bench.store, name, CONFIG, EXTENT)
    assert len(measured()) == len(found.blocks)
    with bench.store.catalog.writing() as writer:
        writer.put_document(
            Document(
                KIND, name, document["key"], {**document, "blocks": [{**document["blocks"][0], "block": "0" * 64}]}
            )
        )
    assert not measured(), "its chain was cut anew"
    with bench.store.catalog.writing() as writer:
        writer.put_document(Document(KIND, name, document["key"], {"blocks": "none"}))
    assert not measured(), "the document is none"
    with bench.store.catalog.writing() as writer:
        writer.put_document(Document(KIND, name, document["key"], document))
    assert measured()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not measured(threads=77), "it was measured with other threads"


def test_parts_run_as_the_whole_does(bench):
    """The timed parts are the real model: its blocks one after the other give the logits of transformers."""
    name = bench.family("llama", "whole")
    work = Workbench(bench.store, name, CONFIG, EXTENT)
    with work.rows(2, 8, 8) as ready, torch.inference_mode():
        hidden = ready.run.run_part(name, 0, 3)
        logits = ready.run.run_part(name, 3, len(work.manifest.components), hidden)
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(bench.folders[name])(torch.full((2, 8), 3)).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
    work.close()


def test_contexts_end_where_the_models_does(bench):
    document = profile_model(
        bench.store, bench.family("llama", "short"), CONFIG, MeasuredExtent((1,), (16, 5000), (9999,))
    )
    assert document["blocks"][0]["decode"]["contexts"] == [16, 256] and list(document["blocks"][0]["prefill"]) == [
        "256"
    ]


def test_refusals(bench):
    name = bench.family("llama", "large")
    with pytest.raises(InputError, match="more than"):
        profile_model(
            bench.store, name, EngineConfig(kv_cache_memory_bytes=1 << 16), MeasuredExtent((64,), (256,), (8,))
        )
    with pytest.raises(NotServable):
        profile_model(
            bench.store, bench.add("falcon", checkpoints.make("falcon", bench.root / "hf" / "falcon")), CONFIG, EXTENT
        )
    with pytest.raises(InputError):
        MeasuredExtent((0,), (1,), (1,))
