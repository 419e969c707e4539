"""Prompts run on a thread of their own, beside the windows of decoding rows (BA-08); no token changes."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from runtime.control.scheduler_io import AbortSequence
from runtime.engine.dense.prompt_thread import PromptThread
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.runtime.engine.dense.test_executor import by_seq, check, dense, known, schedule
from tests.runtime.engine.drive import DenseDevice, Driven, Limits, drive
from tests.runtime.engine.oracle import greedy, reference
from tests.runtime.engine.test_equality import prompts


def ask(name: str, prompt: tuple[int, ...], seq: str, count: int) -> SequenceRequest:
    return SequenceRequest(seq, seq, name, prompt, SamplingParams(max_tokens=count, ignore_eos=True))


class Gate:
    """Holds each batch of the thread until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.batches = threading.Event(), 0
        start, run = PromptThread.start, PromptThread._run

        def counted(thread: PromptThread, *args):
            self.batches += 1
            start(thread, *args)

        def held(thread: PromptThread, *args):
            assert self.open.wait(60)
            return run(thread, *args)

        monkeypatch.setattr(PromptThread, "start", counted)
        monkeypatch.setattr(PromptThread, "_run", held)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each batch of the thread take ten steps, whatever the machine is busy with."""
    finish, steps = PromptThread.finish, Counter[int]()

    def later(thread: PromptThread, wait: bool) -> None:
        steps[id(thread)] += thread.busy
        if wait or steps[id(thread)] > 10:
            steps[id(thread)] = 0
            finish(thread, wait=True)

    monkeypatch.setattr(PromptThread, "finish", later)


def decoding(bench, prompts_run: str = "beside") -> tuple[DenseDevice, Driven, str]:
    """Return an engine in which one sequence decodes."""
    name = known(bench, "llama")
    made = dense(bench, name, slots=3, prompts=prompts_run)
    driven = Driven(made, Limits(max_num_batched_tokens=64))
    driven.arrive(ask(name, prompts(1, (5,))[0], "first", 60))
    while len(driven.out.events.get("first", ())) < 2:
        driven.step()
    return made, driven, name


def test_rows_decode_while_a_prompt_runs(bench, monkeypatch):
    made, driven, name = decoding(bench)
    gate = Gate(monkeypatch)
    driven.arrive(ask(name, prompts(2, (30,))[0], "long", 5))
    before = len(driven.out.events["first"])
    for _ in range(7):
        driven.step()
    assert len(driven.out.events["first"]) == before + 7, "each step has decoded"
    assert "long" not in driven.out.events and driven.out.steps[-1].deferred == ("long",)
    assert gate.batches == 1, "its batch was started once"
    gate.open.set()
    driven.end()
    for seq, prompt, count in (("first", prompts(1, (5,))[0], 60), ("long", prompts(2, (30,))[0], 5)):
        assert driven.out.tokens(seq) == greedy(reference(bench.folders[name]), prompt, count, eos_token_id=[])
    assert made.pages_used == 0


def test_prompts_before_the_window_keep_it_waiting(bench, monkeypatch):
    """The negative control: in the step that runs the prompt, its token is there at once."""
    made, driven, name = decoding(bench, "before")
    gate = Gate(monkeypatch)
    driven.arrive(ask(name, prompts(2, (30,))[0], "long", 5))
    driven.step()
    assert "long" in driven.out.events and gate.batches == 0 and made.prompts is None


def test_without_decoding_rows_a_step_runs_its_prompts_itself(bench, monkeypatch):
    name, gate = known(bench, "llama"), Gate(monkeypatch)
    made = dense(bench, name, slots=3, prompts="beside")
    out = drive(made, {0: [ask(name, prompts(3, (9,))[0], "only", 6)]})
    assert len(out.tokens("only")) == 6 and gate.batches == 0


@pytest.mark.parametrize("mode", ["pd", "baton-pd"])
@pytest.mark.parametrize(("budget", "padding"), [(11, "skipped"), (64, "skipped"), (64, "computed")])
def test_random_schedules(bench, slow, mode, budget, padding):
    """With 11 tokens a step, chunks change while they run: those results are dropped, and no token is lost."""
    name = known(bench, "llama")
    for seed in range(2):
        arrivals = schedule(seed, name, 9)
        made = dense(bench, name, mode=mode, slots=3, padding=padding, prompts="beside")
        out = drive(made, arrivals, Limits(max_num_batched_tokens=budget))
        check(bench, name, by_seq(arrivals), out)
        assert made.pages_used == 0 or mode == "pd"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["falcon", "mpt", "gemma2"])
def test_two_models_and_adapters(bench, slow, family):
    base, other = known(bench, family), known(bench, "llama")
    tuned = f"{family}-lora"
    if tuned not in bench.folders:
        bench.lora(base, tuned, seed=4)
    arrivals = [schedule(seed, name, 5) for seed, name in enumerate((base, tuned, other))]
    made = dense(bench, base, tuned, other, prompts="beside")
    joined = {at: [one for each in arrivals for one in each.get(at, ())] for at in range(30)}
    out = drive(made, joined, Limits(max_num_batched_tokens=48))
    plain = drive(dense(bench, base, tuned, other), joined, Limits(max_num_batched_tokens=48))
    assert {seq: out.tokens(seq) for seq in by_seq(joined)} == {seq: plain.tokens(seq) for seq in by_seq(joined)}


def test_sampling_and_scores_are_those_of_prompts_before(bench):
    name = known(bench, "llama")
    params = [
        SamplingParams(max_tokens=9, temperature=0.9, seed=5, logprobs=2),
        SamplingParams(max_tokens=6, prompt_logprobs=1, logprobs=1),
        SamplingParams(max_tokens=12, temperature=1.3, top_p=0.9, presence_penalty=0.5, seed=8),
        SamplingParams(max_tokens=0, prompt_logprobs=2),
    ]
    asked = {
        i: [SequenceRequest(f"{i}", f"{i}", name, prompt, params[i])]
        for i, prompt in enumerate(prompts(6, (4, 19, 7, 12)))
    }
    one, two = (
        drive(dense(bench, name, slots=3, prompts=way), asked, Limits(max_num_batched_tokens=32)).events
        for way in ("before", "beside")
    )
    for seq, events in one.items():
        assert [(each.token, each.finish) for each in events] == [(each.token, each.finish) for each in two[seq]]
        scores = [[len(part.chosen) for each in some for part in each.prompt_logprobs] for some in (events, two[seq])]
        assert sum(scores[0]) == sum(scores[1])


@pytest.mark.parametrize("mode", ["pd", "baton-pd"])
def test_no_trace_exceeds_the_memory(bench, slow, mode):
    name, other = known(bench, "llama"), known(bench, "falcon")
    for seed in range(6):
        rng = random.Random(seed)
        arrivals: dict[int, list[SequenceRequest]] = {}
        for number in range(11):
            model = (name, other)[number % 2]
            prompt = tuple(rng.randrange(3, checkpoints.VOCAB) for _ in range(rng.choice((1, 2, 12, 25, 40))))
            params = SamplingParams(max_tokens=rng.choice((2, 20)))
            one = SequenceRequest(f"{number}", f"{number}", model, prompt, params, rng.randrange(3))
            arrivals.setdefault(rng.randrange(12), []).append(one)
        made = dense(bench, name, other, mode=mode, slots=5, pages=3 * (15 + seed), prompts="beside")
        out = drive(made, arrivals, Limits(max_num_batched_tokens=64))
        assert 0 < made.peak_pages <= made.page_capacity, f"{made.peak_pages} of {made.page_capacity} pages"
        for model in (name, other):
            check(bench, model, {seq: one for seq, one in by_seq(arrivals).items() if one.model == model}, out)


def test_a_sequence_that_leaves_while_its_prompt_runs_leaves_nothing(bench, monkeypatch):
    made, driven, name = decoding(bench)
    gate = Gate(monkeypatch)
    driven.arrive(ask(name, prompts(2, (30,))[0], "long", 5))
    driven.step()
    assert gate.batches == 1
    driven.tell(AbortSequence("long"))
    timer = threading.Timer(0.3, gate.open.set)
    timer.start()
    driven.end()  # the step with its release waits for the batch
    timer.join()
    assert made.pages_used == 0 and not made.prompts.busy
    assert not made.prompts._ran and not made.prompts._failed


def test_a_failed_batch_ends_its_own(bench, monkeypatch):
    made, driven, name = decoding(bench)
    with monkeypatch.context() as patch:
        patch.setattr(PromptThread, "_run", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        driven.arrive(ask(name, prompts(2, (30,))[0], "long", 5))
        while "long" not in driven.out.events:
            driven.step()
    assert driven.out.events["long"][-1].error == "the engine failed: RuntimeError"
    driven.end()
    assert made.pages_used == 0
    out = drive(made, {0: [ask(name, prompts(2, (30,))[0], "again", 5)]})
    assert out.tokens("again") == greedy(reference(bench.folders[name]), prompts(2, (30,))[0], 5, eos_token_id=[])


def test_models_come_and_go_while_a_prompt_runs(bench, monkeypatch):
    made, driven, name = decoding(bench)
    gate = Gate(monkeypatch)
    driven.arrive(ask(name, prompts(2, (30,))[0], "long", 5))
    driven.step()
    timer = threading.Timer(0.05, gate.open.set)
    timer.start()
    made.load(known(bench, "falcon"))  # waits for the prompt
    assert not made.prompts.busy
    timer.join()
    driven.end()
    assert driven.out.tokens("long") == greedy(reference(bench.folders[name]), prompts(2, (30,))[0], 5, eos_token_id=[])
