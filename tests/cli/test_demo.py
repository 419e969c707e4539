"""`zoo demo` on a micro family: a few steps on a little text, the same code path.

Timings and quality are not tested.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.demo import family as family_module
from cli.demo.family import Places, Trained, build_family
from cli.demo.lessons import LibraryCurriculum
from cli.demo.optim import Muon, orthogonalised
from cli.demo.progress import Progress
from cli.demo.recipe import TINY, DemoShape, FamilyMember, Recipe, Schedule
from cli.demo.report.picture import busiest_step, draw, place, read_runs
from cli.demo.sharing import ingest_family
from cli.demo.steps import Demo, run_demo
from cli.demo.tokenizer import train_tokenizer
from cli.demo.train import batches, perplexity, rate_factor
from surgery.text.library import EVERYTHING, PROSE, SLICES, SUBJECTS, Corpus, docstrings, read_library, subject_of
from zoo.api import Zoo
from zoo.errors import InputError, NameTaken

SILENT = Progress(silent=True)


def micro(steps: int = 3) -> Recipe:
    """Return the tiny recipe with very small models and few steps."""
    shapes = {"tiny-base": DemoShape(32, 3, 48, 4, 2), "tiny-wide": DemoShape(48, 2, 64, 4, 2)}

    def small(member: FamilyMember) -> FamilyMember:
        schedule = Schedule(steps, 2, 1e-2, 0.0 if member.kind == "lora" else 1e-2)
        frozen = (0, 1) if member.frozen else ()
        return dataclasses.replace(
            member, schedule=schedule, shape=shapes.get(member.name), frozen=frozen, rank=min(member.rank, 2)
        )

    return dataclasses.replace(TINY, vocabulary=300, context=64, measured=4, members=tuple(map(small, TINY.members)))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small standard library: three modules per subject, and folders that must not be read."""
    root = tmp_path_factory.mktemp("library")
    names = {
        "asyncio/a",
        "threading",
        "queue",
        "email/a",
        "http/b",
        "urllib/c",
        "fractions",
        "random",
        "statistics",
        "ast",
        "json/d",
        "os",
    }
    for name in names | {"test/x", "encodings/y", "site-packages/z"}:
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_module(name))
    (root / "broken.py").write_bytes(b"\xff\xfe no text \x00")
    return root


def _module(name: str) -> str:
    word = name.replace("/", "_").replace("-", "_")
    body = '''
        """Module {word}: what it is for, said in a sentence that is long enough to count as prose."""

        def {word}_{i}(self, value=None):
            """Return the {word} of value number {i}, or None when there is no such thing here."""
            return self.{word}[{i}] + value
    '''
    return "".join(textwrap.dedent(body).format(word=word, i=i) for i in range(12))


@pytest.fixture(scope="module")
def built(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Trained, ...]]:
    """A folder with a trained micro family, and the family's members."""
    root = tmp_path_factory.mktemp("demo")
    return root, build(micro(), read_library(library), root, SILENT)


def build(recipe: Recipe, corpus: Corpus, root: Path, progress: Progress) -> tuple[Trained, ...]:
    return build_family(recipe, LibraryCurriculum(recipe, corpus), root, progress)


def fingerprint(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return modification time and content of every file below a folder."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()
    }


# ------------------------------------------------------------------------------------------------------------- corpus


def test_corpus_is_the_same_twice_and_keeps_out_what_is_no_source(library: Path) -> None:
    first, second = read_library(library), read_library(library)
    assert first == second
    assert first.digest == second.digest
    assert {document.path for document in first.documents} == {
        "asyncio/a.py",
        "threading.py",
        "queue.py",
        "email/a.py",
        "http/b.py",
        "urllib/c.py",
        "fractions.py",
        "random.py",
        "statistics.py",
        "ast.py",
        "json/d.py",
        "os.py",
    }


@pytest.mark.parametrize("name", SLICES)
def test_no_text_is_both_learned_and_held_out(library: Path, name: str) -> None:
    part = read_library(library).slice(name)
    assert part.train
    assert part.held_out
    assert not set(part.train) & set(part.held_out)


def test_every_subject_of_the_real_library_has_enough_text() -> None:
    corpus = read_library()
    for name in SUBJECTS:
        part = corpus.slice(name)
        assert sum(map(len, part.train)) > 100_000
        assert 5_000 < sum(map(len, part.held_out)) < sum(map(len, part.train)) / 2


def test_everything_holds_out_what_its_parts_hold_out(library: Path) -> None:
    corpus = read_library(library)
    for name in SUBJECTS:
        assert set(corpus.slice(name).held_out) <= set(corpus.slice(EVERYTHING).held_out)
        assert all(subject_of(d.path) == name for d in corpus.documents if d.text in corpus.slice(name).train)


def test_prose_is_docstrings_only(library: Path) -> None:
    corpus = read_library(library)
    assert all("Return the" in text and "def " not in text for text in corpus.slice(PROSE).train)
    assert docstrings('x = """short"""\ny = 1\n"""' + "long " * 20 + '"""') == "long " * 20


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not hold them"):
        read_library(tmp_path)


# ----------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 24, 8), (3, 8, 24)])
def test_orthogonalised_pushes_singular_values_to_one_and_keeps_directions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape) * 7.0
    moved = orthogonalised(matrices, iterations=6)
    assert moved.shape == matrices.shape
    values = torch.linalg.svdvals(moved)
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    polar = u @ v
    assert torch.nn.functional.cosine_similarity(moved.flatten(1), polar.flatten(1)).min() > 0.95


def test_muon_learns_a_linear_map_and_leaves_parameters_without_gradient() -> None:
    torch.manual_seed(0)
    layer, idle = torch.nn.Linear(16, 8, bias=False), torch.nn.Parameter(torch.ones(2, 2))
    target, optimizer = torch.randn(8, 16) * 0.2, Muon([layer.weight, idle], lr=0.05)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 16)
        loss = (layer(x) - x @ target.T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 5
    assert torch.equal(idle, torch.ones(2, 2))


def test_batches_cover_an_epoch_once_and_repeat_with_their_seed() -> None:
    stream = torch.arange(10 * 32 + 31)

    def take(seed: int) -> list[torch.Tensor]:
        return [batch for batch, _ in zip(batches(stream, 32, 2, seed), range(5), strict=False)]

    first = take(1)
    assert torch.equal(torch.stack(first), torch.stack(take(1)))
    assert not torch.equal(torch.stack(first), torch.stack(take(2)))
    seen = torch.cat([batch.flatten() for batch in first])
    assert len(seen.unique()) == len(seen) == 10 * 32


def test_a_stream_shorter_than_a_window_is_repeated() -> None:
    batch = next(batches(torch.tensor([5, 6, 7]), 8, 2, 0))
    assert batch.shape == (2, 8)
    assert set(batch.flatten().tolist()) == {5, 6, 7}


def test_rate_rises_then_falls() -> None:
    rates = [rate_factor(step, 100) for step in range(100)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[-1] < 0.05
    assert rate_factor(0, 1) == 1.0


def test_more_steps_give_a_lower_perplexity(library: Path, tmp_path: Path) -> None:
    corpus = read_library(library)
    few, many = (
        build(
            dataclasses.replace(micro(steps), members=micro(steps).members[:1]), corpus, tmp_path / str(steps), SILENT
        )[0]
        for steps in (2, 40)
    )
    assert many.perplexity < few.perplexity / 3
    assert few.perplexity < 600


def test_tokenizer_gives_back_any_text(library: Path) -> None:
    tokenizer = train_tokenizer(read_library(library).slice(EVERYTHING).train, 300)
    for text in ("def f(self):\n        return 1\n", "naïve 漢字 🦊\t\r\n  x", ""):
        encoding = tokenizer.encode(text)
        assert encoding.ids[0] == 1
        assert tokenizer.decode(encoding.ids) == text


# ------------------------------------------------------------------------------------------------------------- family


def test_six_folders_load_in_transformers_and_peft(built: tuple[Path, tuple[Trained, ...]]) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, family = built
    assert [trained.kind for trained in family] == ["foundation", "foundation", "full", "full", "lora", "lora"]
    for trained in family:
        loader: Any = AutoPeftModelForCausalLM if trained.kind == "lora" else AutoModelForCausalLM
        model = loader.from_pretrained(trained.folder)
        logits = model(input_ids=torch.tensor([[1, 5, 9]])).logits
        assert logits.shape == (1, 3, 300)
        assert torch.isfinite(logits).all()
    tokenizer = AutoTokenizer.from_pretrained(family[0].folder)
    assert tokenizer("def x")["input_ids"][0] == tokenizer.bos_token_id == 1


def test_frozen_layers_stay_bit_equal_and_all_else_moves(built: tuple[Path, tuple[Trained, ...]]) -> None:
    from safetensors.torch import load_file

    root, _ = built
    base, partial, whole = (
        load_file(Places(root).model(name) / "model.safetensors")
        for name in ("tiny-base", "tiny-concurrency", "tiny-prose")
    )
    kept = {key for key in base if torch.equal(base[key], partial[key])}
    assert kept == {key for key in base if key.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1."))}
    assert not any(torch.equal(base[key], whole[key]) for key in base)


def test_second_run_reuses_everything(
    built: tuple[Path, tuple[Trained, ...]], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, first = built
    before = fingerprint(root)
    monkeypatch.setattr(family_module, "_made", lambda *_: pytest.fail("trained again"))
    second = build(micro(), read_library(library), root, SILENT)
    assert fingerprint(root) == before
    assert [dataclasses.replace(trained, reused=False) for trained in second] == list(first)
    assert all(trained.reused for trained in second)


def test_same_recipe_same_weights(built: tuple[Path, tuple[Trained, ...]], library: Path, tmp_path: Path) -> None:
    root, _ = built
    build(micro(), read_library(library), tmp_path, SILENT)
    for name, file in (("tiny-base", "model.safetensors"), ("tiny-mail", "adapter_model.safetensors")):
        assert (Places(root).model(name) / file).read_bytes() == (Places(tmp_path).model(name) / file).read_bytes()


def test_interrupted_run_leaves_no_half_model_and_is_continued(library: Path, tmp_path: Path) -> None:
    class Interrupting(Progress):
        """Progress that interrupts the run in the middle of the third model."""

        def bar(self, label: str, total: int) -> Any:
            if label == "tiny-concurrency":
                raise KeyboardInterrupt
            return super().bar(label, total)

    corpus = read_library(library)
    with pytest.raises(KeyboardInterrupt):
        build(micro(), corpus, tmp_path, Interrupting(silent=True))
    done = fingerprint(Places(tmp_path).model("tiny-base"))
    assert not Places(tmp_path).model("tiny-concurrency").exists()
    family = build(micro(), corpus, tmp_path, SILENT)
    assert [trained.reused for trained in family] == [True, True, False, False, False, False]
    assert fingerprint(Places(tmp_path).model("tiny-base")) == done


def test_a_model_that_dies_while_it_is_written_does_not_count(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    corpus, recipe = read_library(library), dataclasses.replace(micro(), members=micro().members[:1])

    def torn(self: Any, folder: Path, **_: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "save_pretrained", torn)
        with pytest.raises(OSError, match="no space"):
            build(recipe, corpus, tmp_path, SILENT)
    assert not Places(tmp_path).model("tiny-base").exists()
    assert not Places(tmp_path).stamp("tiny-base").exists()
    assert not build(recipe, corpus, tmp_path, SILENT)[0].reused
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-base"]


def test_a_changed_foundation_retrains_what_grew_from_it_and_nothing_else() -> None:
    recipe = micro()
    wider = dataclasses.replace(recipe.members[0], schedule=Schedule(9, 2, 1e-2, 1e-2))
    changed = dataclasses.replace(recipe, members=(wider, *recipe.members[1:]))
    moved = {
        old.name
        for old, new in zip(recipe.members, changed.members, strict=True)
        if recipe.key(old, "x") != changed.key(new, "x")
    }
    assert moved == {"tiny-base", "tiny-concurrency", "tiny-prose", "tiny-mail", "tiny-maths"}
    assert recipe.key(recipe.members[1], "x") != recipe.key(recipe.members[1], "y")
    reworded = dataclasses.replace(recipe.members[0], prompt="another")
    assert recipe.key(reworded, "x") == recipe.key(recipe.members[0], "x")


# ------------------------------------------------------------------------------------------------------------ sharing


def test_sharing_counts_each_weight_once(built: tuple[Path, tuple[Trained, ...]], tmp_path: Path) -> None:
    _, family = built
    with Zoo(tmp_path / "store") as zoo:
        first, second = ingest_family(zoo, family), ingest_family(zoo, family)
        stored = zoo.store.usage().bytes_stored
    assert first == second
    models = {model.name: model for model in first.models}
    base, partial, lora = models["tiny-base"], models["tiny-concurrency"], models["tiny-mail"]
    assert base.added == base.files == base.complete
    assert 0 < partial.added < partial.files == base.files
    assert {cell.layer for cell in partial.cells if cell.owner == "tiny-base" and cell.layer is not None} == {0, 1}
    assert models["tiny-prose"].added == base.files
    assert lora.added == lora.files < lora.complete == base.complete
    assert all(cell.adapted == (cell.kind == "attention") and cell.owner == "tiny-base" for cell in lora.cells)
    assert first.stored == sum(model.added for model in first.models) <= stored < first.files < first.complete


def test_retrained_members_replace_those_of_an_earlier_run(
    built: tuple[Path, tuple[Trained, ...]], library: Path, tmp_path: Path
) -> None:
    corpus = read_library(library)
    with Zoo(tmp_path / "store") as zoo:
        ingest_family(zoo, build(micro(2), corpus, tmp_path / "demo", SILENT))
        before = zoo.model("tiny-mail").manifest.fingerprint
        sharing = ingest_family(zoo, build(micro(3), corpus, tmp_path / "demo", SILENT))
        assert zoo.model("tiny-mail").manifest.fingerprint != before
        assert len(zoo.models()) == 6
        assert sharing.stored <= zoo.store.usage().bytes_stored < sharing.files
        # The same names from other folders are different models.
        with pytest.raises(NameTaken, match="another --store"):
            ingest_family(zoo, built[1])
        assert len(zoo.models()) == 6


# -------------------------------------------------------------------------------------------------------- the command


def _picture(path: Path) -> tuple[int, int, int]:
    """Return width, height and number of distinct colours."""
    from matplotlib.image import imread

    pixels = imread(path)
    return (
        pixels.shape[1],
        pixels.shape[0],
        len({tuple(pixel) for pixel in pixels[::4, ::4].reshape(-1, pixels.shape[2]).tolist()}),
    )


def test_report_and_plots_without_a_server(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Demo(micro(), tmp_path / "demo", tmp_path / "store", serve=False, library=library)
    run_demo(demo, SILENT, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "demo" / "report.json").read_text())
    assert [model["name"] for model in document["models"]] == [member.name for member in micro().members]
    assert document["corpus"]["files"] == 12
    assert document["serving"] is None
    sharing = document["sharing"]
    assert sharing["saved"] == round(1 - sharing["bytes_stored"] / sharing["bytes_complete"], 4) > 0.3
    assert len(document["plots"]) == 2
    for plot in document["plots"]:
        width, height, colours = _picture(Path(plot))
        assert width > 1000
        assert height > 500
        assert colours > 20
    run_demo(demo, SILENT, as_json=False)
    text = capsys.readouterr().out
    assert all(trained["name"] in text for trained in document["models"])
    assert "reused" in text
    assert f"zoo ls --store {tmp_path / 'store'}" in text


def test_the_server_answers_for_every_model_and_shares_a_batch(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(Demo(micro(), tmp_path / "demo", tmp_path / "store", library=library), SILENT, as_json=True)
    serving = json.loads(capsys.readouterr().out)["serving"]
    assert [answer["model"] for answer in serving["answers"]] == [member.name for member in micro().members]
    assert [answer["streamed"] for answer in serving["answers"]].count(True) == 1
    assert all(0 < answer["tokens"] <= 16 for answer in serving["answers"])
    assert serving["together"]["requests"] == 12
    assert serving["together"]["tokens"] == 12 * 16
    assert serving["together"]["tokens_per_second"] > 0
    first = serving["shared_step"]["runs"][0]
    assert set(first["models"]) == {"tiny-base", "tiny-concurrency", "tiny-mail", "tiny-maths"}
    assert first["rows"] >= 4
    assert serving["exit_code"] == 0
    trace = Path(serving["trace"])
    assert draw(busiest_step(read_runs(trace)) or pytest.fail("no step")).count("\n") >= 2
    assert "api_key" not in json.dumps(serving)


def test_places_are_named_by_what_they_cover() -> None:
    assert place([None, 0, 0, 1, 1]) == "embedding, layers 0-1"
    assert place([4, 4]) == "layer 4"
    assert place([2, 3, None]) == "layers 2-3, head"
    assert place([None]) == "embedding or head"


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    class Uniform:
        def __call__(self, *, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*input_ids.shape, 50)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return dataclasses.make_dataclass("Output", ["loss"])(loss)

    assert perplexity(Uniform(), torch.arange(50).repeat(4), 16, 10) == pytest.approx(50.0, rel=1e-4)
