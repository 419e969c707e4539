"""Every way to multiply by bfloat16 weights, and every kind of processor that the kernels are compiled for.

The code for AMX runs on an emulated tile unit here, and that one is compared with Intel's description in NumPy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.build import Build, NoKernels
from runtime.engine.kernels.operands import Parts, Pool, PromptChunk, PromptChunks
from runtime.engine.models.registry import kernels_for
from runtime.engine.sampling.choice import NO_COLUMNS, SamplingColumns
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import PagedDevice, drive
from tests.runtime.engine.test_equality import ask, prompts
from zoo.errors import InputError

pytestmark = needs_kernels


def flags() -> set[str]:
    """Features of this processor; none where Linux does not list them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


#: What each path and each kind of processor needs.
NEEDED = {
    "widen": set(), "emulated": set(), "avx512": {"avx512_bf16"}, "amx": {"amx_tile", "amx_bf16"},
    "x86-64": {"sse2"}, "haswell": {"avx2", "fma", "bmi2", "movbe"},
    "skylake-avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}  # fmt: skip
BUILDS = [
    *(Build(path) for path in ("auto", "widen", "emulated", "avx512", "amx")),
    *(Build(march=march) for march in ("x86-64", "haswell", "skylake-avx512")),
    *(Build("emulated", march) for march in ("x86-64", "haswell")),
]


def compiled_for(build: Build) -> Kernels:
    """The kernels with two threads; skips, saying why, where this machine cannot run them."""
    lacking = {name for part in (build.path, build.march) for name in NEEDED.get(part, set())} - flags()
    if lacking:
        pytest.skip(f"KERNELS FOR {build.path}, {build.march} ARE NOT TESTED: no {', '.join(sorted(lacking))}")
    return Kernels(2, build)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build.path} {build.march}")
@pytest.mark.parametrize(("out", "inputs"), [(3, 6), (48, 32), (130, 70)])
def test_products(build: Build, out: int, inputs: int) -> None:
    """Near those in float64, and each row the same bits alone: in tiles that are full or not, and in several blocks."""
    kernels = compiled_for(build)
    torch.manual_seed(out)
    weight, bias = torch.randn(out, inputs).bfloat16(), torch.randn(out)
    packed = kernels.pack(weight)
    assert torch.equal(kernels.unpack(packed, out), weight)
    parts, pair = Parts([packed], [out], [bias]), Parts([packed, packed], [out, out], [bias, None])
    x, add = torch.randn(1, 70, inputs), torch.randn(1, 70, out)
    exact = x.bfloat16().double() @ weight.double().t()
    silu = torch.nn.functional.silu(exact + bias) * exact
    for run, wanted in (
        (lambda x, add: kernels.linear(x, parts, add), exact + bias + add),
        (lambda x, add: kernels.gated(x, pair), silu),
    ):
        whole = run(x, add)
        torch.testing.assert_close(whole.double(), wanted, rtol=2e-4, atol=2e-4)
        for rows in (1, 2, 15, 16, 17, 33):
            assert torch.equal(run(x[:, :rows], add[:, :rows]), whole[:, :rows]), "a row depends on the others"
        assert torch.equal(run(x[:, 69:], add[:, 69:]), whole[:, 69:])
    stored = kernels.stored(x, weight, bias)
    torch.testing.assert_close(stored.double(), exact + bias, rtol=2e-4, atol=2e-4)
    assert torch.equal(
        torch.cat([kernels.stored(x[:, :33], weight, bias), kernels.stored(x[:, 33:], weight, bias)], 1), stored
    )
    if kernels.path in ("emulated", "amx"):
        assert torch.equal(stored, kernels.linear(x, parts)), "a weight as stored has other bits than a packed one"


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build.path} {build.march}")
def test_everything_else_for_a_kind_of_processor(build: Build) -> None:
    """float32 products, norms and attention over pages of both dtypes."""
    kernels = compiled_for(build)
    torch.manual_seed(1)
    weight, x = torch.randn(70, 40), torch.randn(1, 37, 40)
    made = kernels.linear(x, Parts([kernels.pack(weight)], [70], [None]))
    torch.testing.assert_close(made, x @ weight.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        kernels.norm(x, torch.ones(40), 1e-6), torch.nn.functional.rms_norm(x, (40,), eps=1e-6), rtol=1e-4, atol=1e-4
    )
    k, v = (torch.randn(20, 4, 2, 24).bfloat16() for _ in range(2))
    tables, query = torch.randperm(20).view(1, 20).contiguous(), torch.randn(13, 4, 24)
    keys, values = (pool[tables[0]].reshape(80, 2, 24)[:33].float().repeat_interleave(2, 1) for pool in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), scale=0.3,
        attn_mask=torch.ones(13, 33).tril(20).bool(),
    ).transpose(0, 1)  # fmt: skip
    for pool in (Pool(k, v, tables), Pool(k.float(), v.float(), tables)):
        chunk, last = torch.empty(13, 4, 24), torch.empty(1, 4, 24)
        kernels.chunks(query, pool, PromptChunks([PromptChunk(0, 13, 20, 0)]), chunk, 0.3)
        kernels.decode(query[12:], pool, torch.tensor([33]), last, 0.3)
        near = 0.01 if pool.k.dtype == torch.bfloat16 else 1e-4  # where queries and weights are rounded to bfloat16
        torch.testing.assert_close(chunk, wanted, rtol=near, atol=near)
        torch.testing.assert_close(last, wanted[12:], rtol=near, atol=near)
        assert torch.equal(last[0], chunk[12])


def described(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """x [rows, in] times weight [out, in] as TDPBF16PS is described: sums of even and of odd inputs of 32 at a time.

    A product of two bfloat16 is exact in float32, so that an addition rounds as a fused one does.
    """

    def flushed(values: np.ndarray) -> np.ndarray:
        return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values).astype(np.float32)

    a, b = (flushed(each.bfloat16().float().numpy()) for each in (x, weight))
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for tile in range(0, a.shape[1], 32):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for i in range(tile, min(tile + 32, a.shape[1])):
            sums[i % 2] = flushed(sums[i % 2] + flushed(a[:, i, None] * b[None, :, i]))
        total = flushed(total + flushed(sums[0] + sums[1]))
    return total


def test_tiles_give_the_bits_of_intel_s_description() -> None:
    kernels = compiled_for(Build("emulated"))
    torch.manual_seed(4)
    weight, x = torch.randn(45, 102).bfloat16(), torch.randn(1, 35, 102)
    x[0, 3], weight[2, :50] = 1e-39, 2e-39  # denormals
    made = kernels.linear(x, Parts([kernels.pack(weight)], [45], [None]))
    assert np.array_equal(made[0].numpy(), described(x[0], weight))
    assert not made[0, 3].any(), "denormals count"


def test_the_zeros_after_a_row_do_not_meet_the_next_panel() -> None:
    """The last tile of a panel is incomplete: infinite weights behind it would make NaN of x's zeros."""
    kernels = compiled_for(Build("emulated"))
    weight = torch.ones(2 * kernels.panel, 34).bfloat16()
    weight[kernels.panel :] = torch.inf
    made = kernels.linear(torch.ones(1, 3, 34), Parts([kernels.pack(weight)], [2 * kernels.panel], [None]))
    assert torch.equal(made[..., : kernels.panel], torch.full((1, 3, kernels.panel), 34.0))


@pytest.mark.parametrize("apart", [64, 65, 80])
def test_a_stored_weight_is_read_no_further_than_its_rows(apart: int) -> None:
    """What lies between its rows, and behind the last one, is infinite and would make NaN of zeros."""
    kernels = compiled_for(Build("emulated"))
    torch.manual_seed(5)
    x, values = torch.randn(1, 40, 60), torch.randn(48, 60).bfloat16()
    lying = torch.full((64, apart), torch.inf).bfloat16()
    lying[:48, :60] = values
    weight = lying[:48, :60]
    made = kernels.linear(x, Parts([kernels.pack(values)], [48], [None]))
    assert torch.equal(kernels.stored(x, weight), made)


def test_the_fastest_path_of_the_processor_is_chosen() -> None:
    path = Kernels(1).path
    if "amx_bf16" in flags():
        assert path == "amx"
    elif path == "avx512":  # or an old compiler that does not know it
        assert "avx512_bf16" in flags()
    else:
        assert path == "widen"


def test_a_path_that_the_processor_lacks_is_refused() -> None:
    for path, needed in (("amx", "amx_bf16"), ("avx512", "avx512_bf16")):
        if needed in flags():
            continue
        with pytest.raises(InputError, match="has no"):
            kernels_for(EngineConfig(bf16_products=path))  # type: ignore[arg-type]
    with pytest.raises(NoKernels, match="AVX512-BF16"):
        Kernels(1, Build("avx512", "x86-64"))


@pytest.mark.parametrize("changes", [{"kernels": "stock"}, {"weights": "plain"}, {"bf16_products": "fastest"}])
def test_a_path_without_native_kernels_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="bf16_products"):
        EngineConfig(**{"bf16_products": "widen", **changes})  # type: ignore[arg-type]


def test_engines_of_one_process_use_the_paths_that_were_asked_for(bench) -> None:
    """Their rounding differs, so log-probabilities are near and not equal."""
    name = bench.family("llama", "paths", dtype="bfloat16", seed=8)
    answers = []
    for path in ("auto", "widen"):
        config = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels="native", bf16_products=path)
        made = PagedDevice(bench.store, config, [name])
        kernels = made._registry.units.kernels
        assert kernels is not None and kernels.path == (Kernels(1).path if path == "auto" else path)
        asked = [ask(name, prompt, f"{i}", logprobs=8) for i, prompt in enumerate(prompts(3, (5, 20)))]
        run = drive(made, {0: asked})
        answers.append([run.events[f"{i}"][0].top for i in range(2)])
    for ours, theirs in zip(*answers, strict=True):
        near = {one.token: one.logprob for one in theirs}
        shared = [one for one in ours if one.token in near]
        assert len(shared) >= 6 and all(abs(one.logprob - near[one.token]) < 0.05 for one in shared)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build.path} {build.march}")
@pytest.mark.parametrize("width", [5, 64, 1003])
def test_tokens_under_masks(build: Build, width: int) -> None:
    """With vectors of any number of lanes: the first maximum of what is allowed, and draws of what is allowed alone."""
    kernels, random = compiled_for(build), np.random.default_rng(width)
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(width)).round(decimals=1)
    x[3, width // 2], x[4, width // 3] = float("nan"), float("inf")
    bits = random.random((64, -(-width // 32) * 32)) < np.linspace(0.02, 1.0, 64)[:, None]
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    masks = {row: words[row].copy() for row in range(0, 64, 2)}
    masked = x.clone()
    for row in masks:
        masked[row, ~torch.from_numpy(bits[row, :width])] = -float("inf")
    assert torch.equal(kernels.logits.chosen(x, NO_COLUMNS, masks), masked.argmax(-1))
    by = SamplingColumns(range(64), [1.0] * 64, [0] * 64, [1.0] * 64, [0.0] * 64, random.random(64).tolist())
    drawn = kernels.logits.chosen(x, by, masks)
    assert torch.equal(drawn, kernels.logits.chosen(masked, by, {}))
