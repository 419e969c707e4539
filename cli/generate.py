"""`zoo generate`: run one prompt through one model, with the same engine and request checks as the server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.serving.options import ServeOptions, gather
from cli.shared.declared import takes_options
from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json
from zoo.errors import InputError, ZooError

if TYPE_CHECKING:
    from runtime.cluster.driver.base import BaseDriver
    from runtime.frontend.assemble import Generation
    from runtime.frontend.choice import TextPiece
    from runtime.frontend.served_models import ServedModel
    from runtime.types import FinishReason
    from zoo.api import Zoo


@takes_options(ServeOptions, "executor", "device", "dtype", "kv_cache_memory_bytes")
def generate(
    name: Annotated[str, typer.Argument(help="The model, or a unique ending of its name.")],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Length of the answer in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens with this much probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens; 0 from all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from tokens at least this likely beside the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes drawing repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    token_ids: Annotated[str | None, typer.Option(help='The prompt as token ids, "1,2,3", instead of text.')] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    **engine: Any,
) -> None:
    """Continue a prompt with one model of the zoo."""
    from zoo.api import Zoo

    body = {
        "model": name,
        "prompt": _prompt(prompt, token_ids),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "ignore_eos": ignore_eos,
    }
    options = gather(None, engine)
    with Zoo(store, database, create=False) as zoo, _started(zoo, name, options) as (driver, model):
        generation = _assemble(body, model)
        _print(driver, generation, as_json)


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    """Return the prompt from exactly one of the two arguments. Raises InputError."""
    if (text is None) == (token_ids is None):
        raise InputError("give the prompt either as text or as --token-ids")
    if text is not None:
        return text
    try:
        return [int(part) for part in (token_ids or "").split(",") if part.strip()]
    except ValueError:
        raise InputError("--token-ids takes whole numbers with commas between them") from None


@contextmanager
def _started(zoo: Zoo, name: str, options: ServeOptions) -> Iterator[tuple[BaseDriver, ServedModel]]:
    """Start a driver with one model and yield both."""
    from cli.serving.beside import beside
    from cli.serving.driver import start_driver
    from cli.serving.models import choose
    from cli.serving.source import ZooSource

    config, source = options.engine(), ZooSource(zoo)
    chosen = choose(zoo, [name], config.dtype, options.executor, config.device)

    def prepare() -> None:
        import runtime.frontend.assemble
        import runtime.frontend.choice  # noqa: F401

        source.read_tokenizers(chosen.names)

    with beside(prepare):
        driver = start_driver(zoo, options, chosen)
    with driver:
        yield driver, source.served(driver.models()[0])


def _assemble(body: dict[str, Any], model: ServedModel) -> Generation:
    """Parse and check the body as a request over HTTP is. Raises InputError."""
    from runtime.frontend.assemble import Limits, Receipt, assemble_completion
    from runtime.frontend.schemas import CompletionBody, parse

    try:
        raw = json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError("the prompt is no valid UTF-8") from None
    return assemble_completion(parse(CompletionBody, raw), model, Receipt("generate"), Limits())


def _pieces(driver: BaseDriver, generation: Generation) -> Iterator[TextPiece]:
    """Yield the piece of each token until the choice has ended. Raises ZooError if it failed."""
    from runtime.frontend.choice import AnswerChoice

    choice = AnswerChoice(generation, 0)
    for event in driver.run(generation.sequences):
        piece = choice.add_events([event])
        if piece.finish in ("error", "abort"):
            raise ZooError(piece.error or "the sequence was aborted")
        yield piece
        if piece.finish is not None:
            return


def _print(driver: BaseDriver, generation: Generation, as_json: bool) -> None:
    live = not as_json and sys.stdout.isatty()
    text: list[str] = []
    tokens: list[int] = []
    finish: FinishReason | None = None
    for piece in _pieces(driver, generation):
        text.append(piece.text)
        tokens += piece.tokens
        finish = piece.finish
        if live:
            print(piece.text, end="", flush=True)
    if not as_json:
        print("" if live else "".join(text))
        return
    prompt = generation.prompt_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": len(tokens), "total_tokens": prompt + len(tokens)}
    name = generation.model.name
    print_json({"model": name, "text": "".join(text), "token_ids": tokens, "finish_reason": finish, "usage": usage})
