"""Chains that cannot be served are refused when they are loaded, with a one-line error, and leave nothing loaded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from runtime.config import EngineConfig
from surgery.chains.plan import stitch_component, stitch_spec
from tests import checkpoints
from tests.chains import manifest_of, put_chain, put_changed, put_stitch
from tests.runtime.engine.catalog.test_describe import COUNT, ask
from tests.runtime.engine.chain_family import agreeing
from tests.runtime.engine.drive import PagedDevice, drive
from tests.runtime.engine.test_equality import engine, prompts
from zoo.errors import MalformedCheckpoint, NotServable


@pytest.fixture(scope="module")
def made(bench) -> PagedDevice:
    """An engine with two parents; the store also has `chain`: layers of one, a stitch, layers of the other."""
    bench.family("llama", "narrow", seed=1)
    bench.family("llama", "wide", hidden_size=96, num_attention_heads=6, num_key_value_heads=6, seed=2)
    put_stitch(bench.store, "narrow", "wide")
    put_chain(bench.store, "chain", ("narrow", 0, 2), ("wide", 1, 3))
    return engine(bench, "narrow", "wide")


_NUMBERS = itertools.count()


def refused(bench, made: PagedDevice, error: type[Exception], match: str, **changes) -> None:
    before, name = made.memory().weights, f"broken {next(_NUMBERS)}"
    put_changed(bench.store, "chain", name, **changes)
    with pytest.raises(error, match=match):
        made.load(name)
    assert made.memory().weights == before and name not in [spec.name for spec in made.models()]


def set_link(at: int, **values):
    return lambda config: config["chain"][at].update(values)


def drop_link(at: int):
    return lambda config: config["chain"].pop(at)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (drop_link(2), "does not list"),
        (set_link(1, layer=9), "no layer"),
        (set_link(1, source=7), "names no source"),
        (set_link(1, kind="stitch"), "stitch without widths"),
        (lambda config: config.pop("sources"), "list of sources"),
        (lambda config: config["sources"][0].update(num_attention_heads=7), "refuses its config"),
    ],
)
def test_configs_that_do_not_describe_the_chain(bench, made, config, match):
    refused(bench, made, MalformedCheckpoint, match, config=config)


def test_components_that_do_not_fit_each_other(bench, made):
    """Without its stitch the narrow model's hidden states would go into the wide model's layers."""
    refused(
        bench,
        made,
        MalformedCheckpoint,
        r"component 5 \(attention\) is for 96 values a token, it would be given 64",
        config=drop_link(5),
        components=lambda placed: placed[:5] + placed[6:],
    )


def test_a_source_of_another_shape_is_found_when_it_is_built(bench, made):
    alone = engine(bench, "narrow")

    def change(config):
        config["sources"][1].update(intermediate_size=40)

    put_changed(bench.store, "chain", "other shapes", config=change)
    before = alone.memory().weights
    with pytest.raises(MalformedCheckpoint, match="the config wants"):
        alone.load("other shapes")
    assert alone.memory().weights == before


def test_a_stitch_whose_tensors_are_not_of_its_widths(bench, made):
    def wider(placed):
        old = placed[5].component
        spec, tensors = replace(stitch_spec(old), width_in=64, width_out=96), dict(old.tensors)
        return [
            *placed[:5],
            replace(placed[5], component=stitch_component(spec, tensors["bias"], tensors["weight"])),
            *placed[6:],
        ]

    refused(bench, made, MalformedCheckpoint, "cannot have tensors of shapes", components=wider)


def test_a_chain_without_an_end(bench, made):
    refused(bench, made, NotServable, "from one embedding", config=drop_link(-1), components=lambda placed: placed[:-1])


def test_a_head_for_other_tokens_than_the_embedding_reads(bench, made):
    config = {"config": lambda config: config["sources"][1].update(vocab_size=checkpoints.VOCAB + 8)}
    refused(bench, made, NotServable, "is for 320 tokens, its head for 328", **config)


def test_a_stitch_is_no_model(bench, made):
    with pytest.raises(NotServable, match="is a stitch"):
        made.load("narrow-wide")


def test_a_chain_wider_than_the_pages(bench):
    small = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=1), ["narrow"])
    with pytest.raises(NotServable, match="larger pages"):
        small.load("chain")


def test_several_dtypes_need_one_to_be_chosen(bench, made):
    """How a bfloat16 layer takes float32 hidden states is not defined; cast to one dtype, mixed chains are served."""
    bench.family("llama", "half", dtype="bfloat16", seed=3)
    put_chain(bench.store, "mixed", ("narrow", 0, 2), ("half", 1, 3))
    with pytest.raises(NotServable, match=r"several dtypes \(embedding F32, attention of layer 2 BF16\).*--dtype"):
        made.load("mixed")
    cast = PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4, dtype="float32"), ["mixed", "half"]
    )
    wanted = [("a", prompts(1, (9,))[0])]
    out = drive(cast, {0: [ask("mixed", wanted[0][1], "a")]})
    assert agreeing(bench, "mixed", wanted, out, torch.float32, cast=True) == COUNT


def test_the_context_is_that_of_the_source_with_the_least(bench):
    bench.family("llama", "short", max_position_embeddings=48)
    put_chain(bench.store, "short-chain", ("narrow", 0, 1), ("short", 0, 2), ("narrow", 2, 3))
    put_changed(bench.store, "chain", "lies", config=lambda config: config.update(max_position_embeddings=9999))
    specs = {spec.name: spec for spec in engine(bench, "short-chain", "lies").models()}
    assert specs["short-chain"].max_model_len == 48 and specs["lies"].max_model_len == 256
    assert specs["lies"].kv_layers == sum(
        p.component.kind == "attention" for p in manifest_of(bench.store, "chain").components
    )
