"""`zoo lengths`: train a predictor of the lengths of a model's answers, on the model's own answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table, say
from cli.shared.values import DtypeOption, numbers_of
from zoo.errors import InputError, NameTaken

if TYPE_CHECKING:
    from runtime.frontend.served_models import ServedModel
    from runtime.types import SequenceRequest
    from surrogates.lengths.probe_training import TrainedProbe
    from surrogates.lengths.training import LengthExample, LengthTraining, TrainedLengths
    from zoo.api import Zoo
    from zoo.manifest import ModelManifest

#: Longest answer by default, in tokens; at most half of the model's context.
_LIMIT = 512
#: Sequences that answer at once.
_AT_ONCE = 64


def lengths(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A model, or a unique ending of its name.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSONL: {"prompt": "…"} or {"messages": […]} per line.', show_default="questions"),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Text or JSONL file, or datasets:PATH[:CONFIG][:SPLIT]; cuts of it are prompts.")
    ] = None,
    granularity: Annotated[
        str, typer.Option(help="Tokens of a bucket; several with commas.", show_default="1/16, 1/8, 1/4 of the longest")
    ] = "",
    number: Annotated[int, typer.Option(help="Prompts that are answered at most.", min=50, max=1_000_000)] = 2000,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer.", show_default="512, or half of the context", min=4)
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0.0, max=2.0)] = 0.0,
    kind: Annotated[
        Literal["classifier", "probe"],
        typer.Option(help="A model that reads the prompt, or a probe of the target's own hidden states."),
    ] = "classifier",
    layer: Annotated[
        int | None, typer.Option(help="Layers of the target before the probe.", show_default="half of them")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Learn from the answers' own tokens, too, for [decode] probe_steps.")
    ] = False,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the examples.", show_default="6", min=1, max=1000)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts, the sampling and the training.")] = 0,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the model's predictor.")] = False,
    dtype: DtypeOption = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a model answer prompts, and train TARGET@lengths to predict how long its answers get (zoo serve --lengths).

    With --kind probe, train TARGET@probe (zoo serve --lengths probe). A fifth of the answers score: accuracy beside
    that of always naming the most frequent bucket.
    """
    from cli.shared.progress import counting, hush
    from surrogates.lengths.probe import probed_component
    from surrogates.lengths.probe_storing import PROBE_ENDING
    from surrogates.lengths.storing import ENDING, embedding_of
    from surrogates.lengths.training import LengthTraining
    from zoo.api import Zoo
    from zoo.catalog.names import check_name

    given = numbers_of("--granularity", granularity)
    if prompts is not None and text is not None:
        raise InputError("prompts come from --prompts or from --text, not both")
    if kind == "probe" and epochs is not None:
        raise InputError("--epochs has no effect on a probe, which is trained to its end")
    if layer is not None and kind != "probe":
        raise InputError("--layer has no effect without --kind probe")
    if again and kind != "probe":
        raise InputError("--again has no effect without --kind probe")
    hush()
    with Zoo(store, database, create=False) as zoo:
        manifest = zoo.model(target).manifest
        name = check_name(manifest.name + (PROBE_ENDING if kind == "probe" else ENDING))
        if not replace and any(entry.name == name for entry in zoo.entries()):
            raise NameTaken(f"{name} is there: --replace trains it anew")
        embedding_of(manifest)  # raises for what is no model, before anything is answered
        at = probed_component(manifest, layer) if kind == "probe" else None
        asked = _asked(prompts, text, number, seed)
        with counting("answers", silent=as_json) as progress:
            limit, widths, examples = answers_of(
                zoo, manifest, asked, given, max_tokens, temperature, seed, dtype, progress
            )
        told = {
            "fingerprint": manifest.fingerprint,
            "sampling": {"max_tokens": limit, "temperature": temperature},
            "seed": seed,
            "corpus": _corpus(examples),
        }
        if at is None:
            training = LengthTraining(widths, limit, epochs=epochs or 6, seed=seed)
            document = _put_classifier(zoo, manifest, examples, training, told, replace)
        else:
            document = _put_probe(zoo, manifest, examples, at, again, LengthTraining(widths, limit), told, replace)
    if as_json:
        print_json(document)
        return
    _print(document)


def _asked(prompts: Path | None, text: str | None, number: int, seed: int) -> list[list[dict[str, str]] | str]:
    """Return what to ask: messages, or texts to continue. Raises InputError."""
    from surrogates.lengths.prompts import cuts, questions

    if prompts is not None:
        return _from_lines(prompts)[:number]
    if text is not None:
        from surgery.text.sources import read_documents

        joined = "\n".join(document for document in read_documents(text) if isinstance(document, str))
        found = cuts(joined, number, seed)
        if not found:
            raise InputError(f"--text {text}: too short to cut prompts from")
        return list(found)
    return [[{"role": "user", "content": question}] for question in questions(number, seed)]


def _from_lines(path: Path) -> list[list[dict[str, str]] | str]:
    found: list[list[dict[str, str]] | str] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        prompt = record.get("prompt", record.get("messages")) if isinstance(record, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            raise InputError(f'{path}:{number}: neither {{"prompt": "…"}} nor {{"messages": […]}}')
        found.append(prompt)
    return found


def answers_of(
    zoo: Zoo,
    manifest: ModelManifest,
    asked: Sequence[list[dict[str, str]] | str],
    granularity: Sequence[int],
    max_tokens: int | None,
    temperature: float,
    seed: int,
    dtype: str | None,
    progress: Any,
) -> tuple[int, tuple[int, ...], list[LengthExample]]:
    """Return the most tokens of an answer, the granularities, and each prompt with the length of the model's answer.

    Raises InputError for prompts that the model cannot take and for granularities, before it answers; NotServable.
    """
    from cli.serving.models import Chosen
    from cli.serving.one_device import start_one_device
    from cli.serving.options import gather
    from cli.serving.source import ZooSource
    from surrogates.lengths.buckets import granularities_of
    from surrogates.lengths.training import LengthExample

    options, source = gather(None, {"dtype": dtype}), ZooSource(zoo)
    source.read_tokenizers((manifest.name,))
    chosen = Chosen((manifest.name,), (), "paged")
    with start_one_device(zoo, options.engine(), chosen, max_num_seqs=_AT_ONCE) as driver:
        model = source.served(driver.models()[0])
        limit = max_tokens or min(_LIMIT, model.spec.max_model_len // 2)
        widths = granularities_of(granularity, limit)
        settings = {"model": model.name, "max_tokens": limit, "temperature": temperature}
        requests = [
            request
            for at, each in enumerate(asked)
            if (request := request_of(model, f"l{at}", each, {**settings, "seed": seed + at})) is not None
        ]
        if not requests:
            raise InputError(f"no prompt leaves room for answers of {limit} tokens: give a lower --max-tokens")
        answers: dict[str, list[int]] = {request.seq: [] for request in requests}
        ended = 0
        for event in driver.run(requests):
            if event.error is not None:
                raise InputError(f"a prompt failed: {event.error}")
            if event.token is not None:
                answers[event.seq].append(event.token)
            if event.finish is not None and progress is not None:
                ended += 1
                progress(ended, len(requests))
    made = ((request.prompt, tuple(answers[request.seq])) for request in requests)
    return limit, widths, [LengthExample(prompt, len(answer), answer) for prompt, answer in made]


def request_of(
    model: ServedModel, name: str, asked: list[dict[str, str]] | str, settings: dict[str, Any]
) -> SequenceRequest | None:
    """Return a request as the server makes it; None if its prompt leaves no room for the longest answer."""
    from runtime.frontend.assemble import Limits, Receipt, assemble_chat, assemble_completion
    from runtime.frontend.errors import RequestError
    from runtime.frontend.schemas import ChatBody, CompletionBody, parse

    chat = isinstance(asked, list)
    body = json.dumps({**settings, "messages" if chat else "prompt": asked}).encode()
    try:
        if chat:
            made = assemble_chat(parse(ChatBody, body), model, Receipt(name), Limits())
        else:
            made = assemble_completion(parse(CompletionBody, body), model, Receipt(name), Limits())
    except RequestError as error:
        if error.code == "context_length_exceeded":
            return None
        hint = "; give --text or --prompts with texts to continue" if error.code == "no_chat_template" else ""
        raise InputError(f"{error}{hint}") from None
    return made.sequences[0]


def _put_classifier(
    zoo: Zoo,
    manifest: ModelManifest,
    examples: Sequence[LengthExample],
    training: LengthTraining,
    told: dict[str, Any],
    replace: bool,
) -> dict[str, Any]:
    """Train and store a classifier; return what is written of it. Raises as `train` and `put_predictor`."""
    from surgery.tensors.pool import stored_tensor
    from surrogates.lengths.buckets import edges_of
    from surrogates.lengths.storing import ENDING, embedding_of, put_predictor
    from surrogates.lengths.training import train

    trained = train(stored_tensor(zoo.store, embedding_of(manifest).digest), examples, training)
    document = {
        **_document(manifest.name + ENDING, manifest, trained),
        **told,
        "edges": list(edges_of(training.widths[0], training.limit)),
        "spread": trained.module.spread,
    }
    put_predictor(zoo.store, manifest.name + ENDING, manifest, trained, document, replace)
    return document


def _put_probe(
    zoo: Zoo,
    manifest: ModelManifest,
    examples: Sequence[LengthExample],
    at: int,
    again: bool,
    training: LengthTraining,
    told: dict[str, Any],
    replace: bool,
) -> dict[str, Any]:
    """Train and store a probe; return what is written of it. Raises as `train_probe` and `put_probe`."""
    from surrogates.lengths.probe import answer_states
    from surrogates.lengths.probe_storing import PROBE_ENDING, put_probe
    from surrogates.lengths.probe_training import EVERY, train_probe

    prompts, answers = [each.prompt for each in examples], [each.answer if again else () for each in examples]
    states = answer_states(zoo.store, manifest, prompts, answers, at, EVERY)
    trained = train_probe(states, examples, at, training.widths, training.limit)
    later = {
        str(made): {str(width): asdict(each) for width, each in some.items()} for made, some in trained.later.items()
    }
    document = {**_document(manifest.name + PROBE_ENDING, manifest, trained), **told, "later": later}
    return put_probe(zoo.store, manifest, trained.probe, document, replace)


def _document(name: str, manifest: ModelManifest, trained: TrainedLengths | TrainedProbe) -> dict[str, Any]:
    return {
        "predictor": name,
        "target": manifest.name,
        "examples": trained.trained + trained.scored,
        "scored": trained.scored,
        "granularity": {
            str(width): {
                "accuracy": each.accuracy,
                "majority": each.majority,
                "confusion": [list(row) for row in each.confusion],
            }
            for width, each in trained.scores.items()
        },
    }


def _corpus(examples: Sequence[LengthExample]) -> str:
    """Return the digest of what was learned from."""
    from zoo.manifest import digest_of

    return digest_of([[list(each.prompt), each.length] for each in examples])


def _print(document: dict[str, Any]) -> None:
    print_table(
        ["granularity", "accuracy", "most frequent bucket"],
        [
            (width, f"{each['accuracy']:.1%}", f"{each['majority']:.1%}")
            for width, each in document["granularity"].items()
        ],
    )
    if document.get("later"):
        print_table(
            ["tokens so far", "answers", "granularity", "accuracy", "from the prompt"],
            [
                (made, each["answers"], width, f"{each['again']:.1%}", f"{each['survived']:.1%}")
                for made, some in document["later"].items()
                for width, each in some.items()
            ],
        )
    mode = "probe" if document.get("kind") == "probe" else "parallel"
    say(
        f"made {document['predictor']} from {document['examples']:,} answers, {document['scored']:,} of which score; "
        f"`zoo serve {document['target']} --lengths {mode}` predicts with it"
    )
