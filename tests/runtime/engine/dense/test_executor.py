"""The dense executor's greedy tokens are those of transformers, in each of Baton's modes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from runtime.config import DenseConfig, EngineConfig
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.dense.kv_store import DenseKV
from runtime.engine.step import runner as step
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.adapters import KINDS
from tests.runtime.engine.adapters.test_adapters import peft_reference
from tests.runtime.engine.drive import DenseDevice, Drive, Driven, Limits, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import ask, prompts
from zoo.errors import NotServable

MODES = ("run-to-completion", "pd", "baton", "baton-pd")
MASKED = [*checkpoints.MASKED, *checkpoints.MASKED_VARIANTS]


def dense(
    bench,
    *names: str,
    mode: str = "baton-pd",
    slots: int = 4,
    pages: int | None = None,
    padding: str = "skipped",
    prompts: str = "before",
    **options,
) -> DenseDevice:
    """Return a dense engine with these models. `pages`: Size of its KV cache, by default 4 MiB."""
    config = EngineConfig(
        kv_cache_memory_bytes=4 << 20,
        page_tokens=4,
        dense=DenseConfig(mode, slots, padding=padding, prompts=prompts),
        **options,
    )
    made = DenseDevice(bench.store, config, names)
    if pages is None:
        return made
    size = made.memory().kv_pool // made.page_capacity
    return DenseDevice(bench.store, replace(config, kv_cache_memory_bytes=pages * size), names)


def known(bench, family: str, name: str | None = None, **options) -> str:
    name = name or family
    return name if name in bench.folders else bench.family(family, name, **options)


def check(bench, name: str, wanted: dict[str, SequenceRequest], out: Drive) -> None:
    model = reference(bench.folders[name])
    for seq, request in wanted.items():
        count = request.sampling.max_tokens
        expected = greedy(model, request.prompt, count, **({"eos_token_id": []} if request.sampling.ignore_eos else {}))
        same_tokens(model, request.prompt, expected, out.tokens(seq))


def schedule(seed: int, model: str, count: int) -> dict[int, list[SequenceRequest]]:
    """Return sequences of random lengths that arrive at random steps, some of them together."""
    rng = random.Random(seed)
    arrivals: dict[int, list[SequenceRequest]] = {}
    for number, prompt in enumerate(prompts(seed, tuple(rng.choice((1, 2, 3, 5, 9, 17, 30)) for _ in range(count)))):
        params = SamplingParams(max_tokens=rng.randint(1, 24))
        seq = f"{model}.{number}"
        arrivals.setdefault(rng.randrange(30), []).append(SequenceRequest(seq, seq, model, prompt, params))
    return arrivals


def by_seq(*schedules: dict[int, list[SequenceRequest]]) -> dict[str, SequenceRequest]:
    return {one.seq: one for each in schedules for requests in each.values() for one in requests}


@pytest.mark.parametrize(
    ("family", "mode", "options"),
    [
        *(("llama", mode, options) for mode in MODES for options in ({}, {"padding": "computed"})),
        *(("llama", mode, {"kernels": "stock"}) for mode in ("run-to-completion", "baton")),
        *((family, mode, {}) for family in MASKED for mode in ("baton", "baton-pd")),
    ],
)
def test_random_schedules(bench, family, mode, options):
    """Rows join and leave at random, chunks have at most eleven tokens; nine sequences share three slots."""
    name = known(bench, family)
    arrivals = schedule(MODES.index(mode), name, 9)
    made = dense(bench, name, mode=mode, slots=3, **options)
    out = drive(made, arrivals, Limits(max_num_batched_tokens=11))
    check(bench, name, by_seq(arrivals), out)
    assert made.idle.waiting == 0 or mode != "baton-pd"
    assert made.pages_used == 0 or mode in ("pd", "run-to-completion")


@pytest.mark.parametrize("family", [*(f for f in checkpoints.SERVED if f != "llama"), *checkpoints.VARIANTS])
def test_families_of_the_paged_executor(bench, family):
    """Windows, soft caps, learned positions, experts: all that uses the attention interface runs dense too."""
    name = known(bench, family)
    for seed, mode in enumerate(("baton", "baton-pd")):
        arrivals = schedule(seed, name, 6)
        check(
            bench,
            name,
            by_seq(arrivals),
            drive(dense(bench, name, mode=mode, slots=3), arrivals, Limits(max_num_batched_tokens=16)),
        )


@pytest.mark.parametrize("mode", ["baton", "baton-pd"])
def test_paged_and_dense_say_the_same_of_everything(bench, mode):
    """Sampled tokens, log-probabilities, those of prompts, penalties and stops, on stock and fused layers."""
    name = known(bench, "llama")
    params = [
        SamplingParams(max_tokens=9, temperature=0.9, seed=5, logprobs=2),
        SamplingParams(max_tokens=6, prompt_logprobs=1, logprobs=1),
        SamplingParams(max_tokens=12, temperature=1.3, top_p=0.9, presence_penalty=0.5, seed=8),
        SamplingParams(max_tokens=0, prompt_logprobs=2),
        SamplingParams(max_tokens=8, min_tokens=4, logit_bias=((2, 50.0),)),
    ]
    requests = {
        i: [SequenceRequest(f"{i}", f"{i}", name, p, params[i])] for i, p in enumerate(prompts(6, (4, 19, 7, 12, 3)))
    }
    config = Limits(max_num_batched_tokens=9)
    paged = drive(
        PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, layers="stock"), [name]),
        requests,
        config,
    )
    out = drive(dense(bench, name, mode=mode, slots=2), requests, config)
    for seq, events in paged.events.items():
        assert [event.token for event in events] == [event.token for event in out.events[seq]]
        assert [event.finish for event in events] == [event.finish for event in out.events[seq]]
        for one, other in zip(events, out.events[seq], strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            assert one.logprob is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)
            mine, theirs = (
                [score.logprob for part in each.prompt_logprobs for score in part.chosen] for each in (one, other)
            )
            assert mine == pytest.approx(theirs, abs=1e-4)


def test_positions_are_the_rows_own(bench):
    """A row that starts beside long ones has the logits it has alone: positions are its own (BA-02)."""
    for family in ("llama", "gptj", "mpt", "bloom", "falcon-alibi"):
        name = known(bench, family)
        long, short = prompts(3, (40, 3))
        alone = drive(dense(bench, name), {0: [ask(name, short, "s", logprobs=3)]})
        both = drive(
            dense(bench, name, mode="baton"), {0: [ask(name, long, "l")], 4: [ask(name, short, "s", logprobs=3)]}
        )
        for one, other in zip(alone.events["s"], both.events["s"], strict=True):
            assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=2e-4)


def test_existing_rows_pay_for_newcomers_with_shaping_and_not_with_embedding(bench):
    """BA-11: a prompt of 9 tokens joins three decoding rows.

    With shaping each of the three computes 8 tokens of padding, otherwise none.
    """
    name = known(bench, "llama")
    arrivals = {0: [ask(name, p, f"{i}", ignore_eos=True) for i, p in enumerate(prompts(1, (5, 5, 5)))]}
    arrivals[4] = [ask(name, prompts(2, (9,))[0], "new", ignore_eos=True)]
    useful = 3 * (5 + 19) + 9 + 19
    shaped, embedded = dense(bench, name, mode="baton", padding="computed"), dense(bench, name, mode="baton-pd")
    skipping = dense(bench, name, mode="baton")
    for made in (shaped, embedded, skipping):
        out = drive(made, arrivals)
        check(bench, name, by_seq(arrivals), out)
        assert made.idle.useful == useful
        assert sum(step.idle for step in out.steps) == made.idle.wasted
    for made in (shaped, skipping):
        assert made.idle.shaping == made.idle.idle == 3 * (9 - 1), "the shapes are the same"
    assert (shaped.idle.wasted, skipping.idle.wasted) == (3 * (9 - 1), 0)
    assert embedded.idle.idle == 0


def test_batches_run_to_completion_compute_for_those_who_are_done(bench):
    """Two rows of 3 and 10 tokens: the finished row is computed seven times for nothing, and a third sequence waits."""
    name = known(bench, "llama")
    lengths = {"a": 3, "b": 10, "c": 2}
    requests = [
        SequenceRequest(seq, seq, name, prompt, SamplingParams(max_tokens=lengths[seq], ignore_eos=True))
        for seq, prompt in zip(lengths, prompts(4, (4, 4, 4)), strict=True)
    ]
    made = dense(bench, name, mode="run-to-completion", slots=2)
    out = drive(made, {0: requests})
    assert made.idle.finished == made.idle.wasted == 7 and made.idle.shaping == 0
    ends = {
        seq: next(i for i, step in enumerate(out.steps) if [one.seq for one in step.sampled].count(seq))
        for seq in lengths
    }
    assert ends["c"] == 10, "the third has its first token in the step after the last of the batch"
    quick = drive(dense(bench, name, mode="baton-pd", slots=2), {0: requests})
    assert len(quick.steps) < len(out.steps)


def test_an_endless_stream_keeps_the_cache_short(bench):
    """Sixty sequences, three slots: the cache stays within the longest sequence plus a bounded margin."""
    name = known(bench, "llama")
    for mode, bound in (("baton-pd", 12 + 8), ("baton", 12 + 8 * 12)):
        made = dense(bench, name, mode=mode, slots=3)
        rng = random.Random(7)
        requests = [
            SequenceRequest(f"{i}", f"{i}", name, prompt, SamplingParams(max_tokens=rng.randint(2, 8), ignore_eos=True))
            for i, prompt in enumerate(prompts(8, tuple(rng.randint(1, 12) for _ in range(60))))
        ]
        lengths = []
        run = made.run

        def watched(plan, inputs, run=run, made=made, lengths=lengths):
            result = run(plan, inputs)
            lengths.append(made._lanes[made.stage("llama")].kv_store.columns.length)
            return result

        made.run = watched
        drive(made, {i: [request] for i, request in enumerate(requests)})
        assert max(lengths) <= bound, mode
        assert max(lengths[len(lengths) // 2 :]) <= max(lengths), mode


def test_who_is_pushed_out_goes_on_as_if_nothing_had_been(bench):
    """BA-14: an urgent prompt takes the slot of the least urgent row.

    That row's K and V are kept, nothing is computed twice, and it gets the next free slot.
    """
    for family in ("llama", "bloom"):
        name = known(bench, family)
        first = [
            replace(ask(name, p, f"{i}", ignore_eos=True), priority=5, arrival=i)
            for i, p in enumerate(prompts(9, (6, 11)))
        ]
        urgent = replace(ask(name, prompts(10, (4,))[0], "urgent", ignore_eos=True), priority=0)
        arrivals = {0: first, 5: [urgent]}
        made = dense(bench, name, slots=2)
        out = drive(made, arrivals)
        check(bench, name, by_seq(arrivals), out)
        assert made.idle.useful == sum(len(one.prompt) + 19 for one in (*first, urgent)) and made.idle.idle == 0
        sampled = [{one.seq for one in step.sampled} for step in out.steps]
        begun = next(i for i, seqs in enumerate(sampled) if "urgent" in seqs)
        assert begun <= 6 and "urgent" in sampled[begun + 1], "it waits for one iteration at most"
        assert not any("1" in seqs for seqs in sampled[begun + 1 : begun + 10]) and out.steps[begun + 1].deferred == (
            "1",
        )


def test_who_is_pushed_out_leaves_its_holes_behind(bench):
    """With shaping, a row that was padded to a new sequence's prompt is saved without the padding, and resumes."""
    name = known(bench, "llama")
    first, second, urgent = (
        ask(name, p, seq, ignore_eos=True) for seq, p in zip("abc", prompts(9, (6, 11, 4)), strict=True)
    )
    arrivals = {0: [replace(first, priority=6)], 3: [replace(second, priority=5)], 7: [urgent]}
    made = dense(bench, name, mode="baton", slots=2)
    out = drive(made, arrivals)
    check(bench, name, by_seq(arrivals), out)
    assert made.idle.shaping == 10 + 3 and made.idle.useful == 6 + 11 + 4 + 3 * 19
    assert any(step.deferred == ("a",) for step in out.steps)


@pytest.mark.parametrize("mode", MODES)
def test_no_trace_exceeds_the_memory(bench, mode):
    """Long and short sequences, a pool for a fifth of them: no page too many is used, every token is right."""
    name, other = known(bench, "llama"), known(bench, "falcon")
    for seed in range(2):
        rng = random.Random(seed)
        arrivals: dict[int, list[SequenceRequest]] = {}
        for number in range(11):
            model = (name, other)[number % 2]
            prompt = tuple(rng.randrange(3, checkpoints.VOCAB) for _ in range(rng.choice((1, 2, 25, 40))))
            one = SequenceRequest(
                f"{number}",
                f"{number}",
                model,
                prompt,
                SamplingParams(max_tokens=rng.choice((2, 20))),
                rng.randrange(3),
            )
            arrivals.setdefault(rng.randrange(12), []).append(one)
        made = dense(bench, name, other, mode=mode, slots=5, pages=3 * (17 + seed))
        out = drive(made, arrivals, Limits(max_num_batched_tokens=30))
        assert 0 < made.peak_pages <= made.page_capacity, f"{made.peak_pages} of {made.page_capacity} pages"
        for model in (name, other):
            check(bench, model, {seq: one for seq, one in by_seq(arrivals).items() if one.model == model}, out)


def test_memory_is_what_the_tensors_take(bench):
    name = known(bench, "llama")
    made = dense(bench, name, slots=4)
    page = made.memory().kv_pool // made.page_capacity
    seen = []
    run = made.run

    def watched(plan, inputs):
        result = run(plan, inputs)
        lane = made._lanes[made.stage(name)]
        kept = sum(x.numel() * x.element_size() for one in lane._kept.values() for x in (*one.k, *one.v))
        seen.append((lane.kv_store.nbytes + kept, made.pages_used * page))
        return result

    made.run = watched
    drive(made, schedule(5, name, 10), Limits(max_num_batched_tokens=20))
    assert max(actual for actual, _ in seen) > 0 and all(actual <= counted for actual, counted in seen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["baton", "baton-pd"])
@pytest.mark.parametrize("family", ["llama", "bloom", "falcon", "gptj", "mpt"])
def test_adapters_beside_their_base(bench, family, mode):
    """LoRAs and every kind of adapter that is served paged: virtual tokens and scales work in either executor."""
    base = known(bench, family)
    names = []
    for number in (1, 2):
        name = f"{family}-lora{number}"
        names.append(name if name in bench.folders else bench.lora(base, name, seed=number, r=3 + number))
    for kind, config in KINDS.items():
        if family != "llama" and kind in ("prefix", "p_tuning"):
            continue
        name = f"{family}-{kind}"
        names.append(name if name in bench.folders else bench.peft(base, name, config(family)))
    made = dense(bench, base, *names, mode=mode, slots=2)
    wanted = {name: list(prompts(n, (3, 11))) for n, name in enumerate((base, *names))}
    requests = [ask(name, wanted[name][i], f"{name}.{i}") for i in range(2) for name in wanted]
    out = drive(made, {i: [request] for i, request in enumerate(requests)}, Limits(max_num_batched_tokens=13))
    for name, given in wanted.items():
        model = reference(bench.folders[base]) if name == base else peft_reference(bench, base, name)
        for i, prompt in enumerate(given):
            same_tokens(model, prompt, greedy(model, prompt, 20), out.tokens(f"{name}.{i}"))


def test_shared_layers_run_once_over_all_models(bench):
    base = known(bench, "llama")
    lora = "llama-lora1" if "llama-lora1" in bench.folders else bench.lora(base, "llama-lora1", seed=1, r=4)
    made = dense(bench, base, lora, trace_segments=True)
    out = drive(
        made,
        {0: [ask(name, p, name, ignore_eos=True) for name, p in zip((base, lora), prompts(1, (4, 6)), strict=True)]},
    )
    last = out.steps[-2]
    assert len(last.segments) == 1 and set(last.segments[0].models) == {base, lora} and last.segments[0].tokens == 2


def test_half_precision(bench):
    for family in ("llama", "bloom", "mpt"):
        name = known(bench, family, f"{family}-bf16", dtype="bfloat16")
        model = reference(bench.folders[name])
        wanted = prompts(4, (1, 8, 19, 30))
        out = drive(
            dense(bench, name, mode="baton"), {2 * i: [ask(name, prompt, f"{i}")] for i, prompt in enumerate(wanted)}
        )
        agreed = [same_tokens(model, p, greedy(model, p, 20), out.tokens(f"{i}")) for i, p in enumerate(wanted)]
        assert sum(agreed) >= 20, "hardly a token agrees"


def test_a_failed_step_ends_its_own_and_nothing_stays(bench, monkeypatch):
    name = known(bench, "llama")
    made = dense(bench, name, slots=2)
    drive(made, {0: [ask(name, p, f"{i}") for i, p in enumerate(prompts(1, (5, 9)))]})
    driven = Driven(made)
    for i, prompt in enumerate(prompts(2, (5, 9, 7))):
        driven.arrive(ask(name, prompt, f"x{i}"))
    for _ in range(3):
        driven.step()
    with monkeypatch.context() as patch:
        patch.setattr(step.StepRun, "execute", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        driven.step()
    assert [events[-1].error for events in driven.out.events.values()] == ["the engine failed: RuntimeError"] * 3
    driven.end()
    assert made.pages_used == 0
    out = drive(made, {0: [ask(name, p, f"{i}") for i, p in enumerate(prompts(1, (5, 9)))]})
    model = reference(bench.folders[name])
    for i, prompt in enumerate(prompts(1, (5, 9))):
        assert same_tokens(model, prompt, greedy(model, prompt, 20), out.tokens(f"{i}")) == len(out.tokens(f"{i}"))


def test_what_is_no_number_stays_where_it_is():
    """Placeholders are zero: NaN of padding or of a slot's former sequence does not reach its row (BA-04)."""
    kv_store = DenseKV(1, torch.device("cpu"))
    kv_store.shape(2, 8)
    for left_behind in (True, False):
        kv_store.enter(None)
        kv_store.enter(None)
        kv_store.begin([3, 1], [0, 0])
        given = torch.ones(6, 1, 4)
        given[3:5] = float("nan")  # the second row's padding
        if left_behind:
            given[5] = float("nan")  # its only token
        out = kv_store.attend(0, Tokens(torch.ones(6, 2, 4), given, given, AttentionSettings()))
        assert torch.isfinite(out[:3]).all(), "one row's numbers are no affair of another's"
        assert torch.isfinite(out[5]).all() != left_behind
        while kv_store.columns.rows:
            kv_store.remove_row(0)
        kv_store.columns.release()


def test_what_only_the_dense_executor_runs_is_refused_by_the_paged_one(bench):
    for family in checkpoints.MASKED:
        with pytest.raises(NotServable, match="only the dense executor"):
            PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=1 << 20), [known(bench, family)])
    prefix = bench.peft("bloom", "bloom-prefix", KINDS["prefix"]("bloom")) if "prefix" in KINDS else None
    if prefix is not None:
        with pytest.raises(NotServable, match="prefix tuning"):
            dense(bench, prefix)
