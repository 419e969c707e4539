"""A mixture runs bit for bit as a checkpoint with exchanged layers, and common prefixes of layers run once."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from surgery.experiments.bench import mixed_model, open_bench
from surgery.experiments.points import Mixture, sharing_points, whole
from tests.checkpoints import VOCAB
from tests.surgery.experiments.conftest import LAYERS
from zoo.errors import InputError


def bench_of(family, *surrogates, a="a"):
    manifests = [family.zoo.model(name).manifest for name in (a, "b", *surrogates)]
    return open_bench(family.zoo.store, manifests[0], manifests[1], manifests[2:])


def surgeon(family, mixture: Mixture):
    """Build the mixture by exchanging tensors between checkpoints."""
    folders = {"a": "a", "b": "b", "s": "pruned"}
    models = {
        letter: AutoModelForCausalLM.from_pretrained(family.root / name).eval() for letter, name in folders.items()
    }
    states = {letter: model.state_dict() for letter, model in models.items()}
    state = dict(states[mixture.ends])
    for layer, letter in enumerate(mixture.layers):
        state |= {key: value for key, value in states[letter].items() if f".layers.{layer}." in key}
    models["b"].load_state_dict(state)
    return models["b"]


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_mixtures_are_the_models_of_exchanged_checkpoints(family, ids):
    bench = bench_of(family, "pruned")
    mixtures = [
        whole(LAYERS, "a"),
        whole(LAYERS, "b"),
        Mixture("aabb"),
        Mixture("bbab"),
        Mixture("bssb"),
        Mixture("aasb", "a"),
    ]
    found = {mixture: bench.head(mixture, hidden) for alike, hidden in bench.run(mixtures, ids) for mixture in alike}
    assert found.keys() == set(mixtures)
    for mixture, logits in found.items():
        assert torch.equal(logits, surgeon(family, mixture)(ids).logits), mixture
    assert not torch.equal(found[mixtures[0]], found[mixtures[1]])


@torch.inference_mode()
def test_common_beginnings_run_once(family, ids, monkeypatch):
    bench = bench_of(family)
    runs = []
    for source, stack in bench.stacks.items():
        run = stack.run
        monkeypatch.setattr(
            stack,
            "run",
            lambda x, course, lo, hi, run=run, source=source: (runs.append((source, lo)), run(x, course, lo, hi))[1],
        )
    mixtures = [point.mixture for point in sharing_points(LAYERS, [1])]
    assert len(list(bench.run(mixtures, ids))) == LAYERS
    # one embedding, then at depth d: b's own path, the path that leaves it here, and those that left it before
    assert len(runs) == 1 + sum(min(depth + 2, LAYERS) for depth in range(LAYERS))


@torch.inference_mode()
def test_components_of_one_digest_run_once_whichever_model_has_them(family, ids):
    """b and its pruned twin share embedding, head and all but two layers."""
    manifests = [family.zoo.model(name).manifest for name in ("pruned", "b")]
    bench = open_bench(family.zoo.store, *manifests, [])
    mixtures = [
        whole(LAYERS, "b"),
        Mixture("abbb"),
        Mixture("bbba"),
        Mixture("bbab"),
        Mixture("aaaa"),
        whole(LAYERS, "a"),
    ]
    grouped = [{mixture.code for mixture in alike} for alike, _ in bench.run(mixtures, ids)]
    assert sorted(map(sorted, grouped)) == [["a:aaaa", "b:aaaa"], ["b:abbb", "b:bbba", "b:bbbb"], ["b:bbab"]]


def test_a_mixture_generates_like_the_exchanged_checkpoint(family, ids):
    bench = bench_of(family)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    mixture = Mixture("baba")
    assert torch.equal(
        mixed_model(bench, mixture).generate(ids, **options), surgeon(family, mixture).generate(ids, **options)
    )


def test_stand_ins_are_the_layers_that_differ(family):
    assert bench_of(family).replaceable == ""
    assert bench_of(family, "pruned").replaceable == "bssb"


@pytest.mark.parametrize(
    ("a", "reason"),
    [("deep", "5 layers and b 4"), ("wide", "128 wide and b 64"), ("other", "another family.*mistral.*llama")],
)
def test_models_of_other_shapes_are_refused_with_the_reason(family, a, reason):
    with pytest.raises(InputError, match=reason):
        bench_of(family, a=a)


def test_virtual_tokens_are_refused(family):
    from tests.adapters import KINDS
    from tests.checkpoints import make_peft

    make_peft(family.root / "b", family.root / "prompt", KINDS["prompt"]("llama"))
    family.zoo.ingest(family.root / "prompt", base="b")
    with pytest.raises(InputError, match="virtual tokens"):
        bench_of(family, a="prompt")


def test_a_surrogate_that_stands_in_for_nothing_is_refused(family):
    with pytest.raises(InputError, match="b stands in for no layer of b"):
        bench_of(family, "b")
