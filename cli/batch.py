"""`zoo batch`: send a file of requests to a running server, and fetch its results. A client of `/v1/batches`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import typer

from cli.shared.output import DEFAULT_STORE, JsonOption, UnusedStoreOption, print_json, print_table, say
from zoo.errors import InputError, NotFound

if TYPE_CHECKING:
    import httpx

Action = Literal["submit", "status", "results", "cancel"]

_ENDED = ("completed", "failed", "expired", "cancelled")
#: Seconds between two looks of `--wait`.
_PAUSE = 1.0
#: Batches that `status` lists.
_LISTED = 20


def batch(
    action: Annotated[Action, typer.Argument(help="submit FILE, status [ID], results ID, or cancel ID.")],
    target: Annotated[str | None, typer.Argument(help="The file of requests, or the batch's id.")] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="ZOO_API_KEY", help="Key that the server asks for.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="submit: the route of the requests.", show_default="that of the first line")
    ] = None,
    window: Annotated[str, typer.Option(help="submit: the time until the batch expires, as 30m, 24h or 7d.")] = "24h",
    metadata: Annotated[list[str] | None, typer.Option(help="submit: KEY=VALUE; may be given again.")] = None,
    key: Annotated[str | None, typer.Option(help="submit: an Idempotency-Key; the same key is the same batch.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="submit, status, results, cancel: wait for its end.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="results: write the answers here.", show_default="standard output")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="results: write the lines without an answer here.", show_default="left out")
    ] = None,
    store: UnusedStoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Run many requests from a file on a server with --queue; they outlive it."""
    with _asking(url, api_key) as client:
        if action == "status" and target is None:
            _show_list(_got(client.get("/v1/batches", params={"limit": _LISTED}))["data"], as_json)
            return
        if target is None:
            raise InputError(f"zoo batch {action} needs " + ("a file" if action == "submit" else "the id of a batch"))
        if action == "submit":
            found = _submit(client, Path(target), endpoint, window, _pairs(metadata or ()), key)
        elif action == "cancel":
            found = _got(client.post(f"/v1/batches/{_plain(target)}/cancel"))
        else:
            found = _got(client.get(f"/v1/batches/{_plain(target)}"))
        if wait:
            found = _end_of(client, found)
        if action == "results":
            _fetch(client, found, out, errors, as_json)
        else:
            _show(found, as_json)


def _submit(
    client: httpx.Client, file: Path, endpoint: str | None, window: str, metadata: Mapping[str, str], key: str | None
) -> dict[str, Any]:
    try:
        with file.open("rb") as lines:
            endpoint = endpoint or _endpoint_of(lines, file)
            lines.seek(0)
            stored = _got(client.post("/v1/files", files={"file": (file.name, lines)}, data={"purpose": "batch"}))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    order = {"input_file_id": stored["id"], "endpoint": endpoint, "completion_window": window}
    if metadata:
        order["metadata"] = dict(metadata)
    headers = {} if key is None else {"Idempotency-Key": key}
    return _got(client.post("/v1/batches", json=order, headers=headers))


def _endpoint_of(lines: BinaryIO, file: Path) -> str:
    """Return the `url` of the first line."""
    try:
        return str(json.loads(lines.readline(1 << 20))["url"])
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"the first line of {file} is no request of a batch: "
            '{"custom_id": …, "method": "POST", "url": "/v1/completions", "body": {…}}'
        ) from None


def _fetch(
    client: httpx.Client, found: Mapping[str, Any], out: Path | None, errors: Path | None, as_json: bool
) -> None:
    if found["status"] not in _ENDED:
        raise InputError(f"batch {found['id']} is {found['status']}; its results come at its end (--wait)")
    if as_json and out is None:
        raise InputError("--json prints a document: give a file for the results with --out")
    if found["output_file_id"] is not None:
        _save(client, found["output_file_id"], out)
    if found["error_file_id"] is not None and errors is not None:
        _save(client, found["error_file_id"], errors)
    if found["error_file_id"] is not None and errors is None:
        say("warning: some lines have no answer; --errors FILE writes why")
    if as_json:
        counts = found["request_counts"]
        print_json({"id": found["id"], "status": found["status"], **counts, "out": str(out), "errors": _text(errors)})


def _save(client: httpx.Client, name: str, path: Path | None) -> None:
    """Write a file of the server to a path; None: to standard output."""
    with client.stream("GET", f"/v1/files/{name}/content") as answer:
        if answer.is_error:
            answer.read()
        _checked(answer)
        try:
            with path.open("wb") if path is not None else _standard_output() as target:
                for data in answer.iter_bytes():
                    target.write(data)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def _end_of(client: httpx.Client, found: dict[str, Any]) -> dict[str, Any]:
    """Wait until a batch has ended."""
    while found["status"] not in _ENDED:
        time.sleep(_PAUSE)
        found = _got(client.get(f"/v1/batches/{found['id']}"))
    return found


def _show(found: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    counts = found["request_counts"]
    print(
        f"{found['id']}  {found['status']}  {counts['completed']} of {counts['total']} answered, "
        f"{counts['failed']} failed"
    )
    for error in (found["errors"] or {}).get("data", ()):
        where = "the file" if error["line"] is None else f"line {error['line']}"
        print(f"{where}: {error['message']}")


def _show_list(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"batches": found})
        return
    print_table(
        ("batch", "status", "lines", "answered", "failed", "input"),
        [
            (
                each["id"],
                each["status"],
                each["request_counts"]["total"],
                each["request_counts"]["completed"],
                each["request_counts"]["failed"],
                each["input_file_id"],
            )
            for each in found
        ],
    )


@contextmanager
def _asking(url: str, api_key: str | None) -> Iterator[httpx.Client]:
    """Open a client of a server. Its failures become InputErrors."""
    import httpx

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=60.0) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{url} cannot be asked: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{url} does not answer as a server with batches does") from None


def _got(answer: httpx.Response) -> dict[str, Any]:
    _checked(answer)
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{answer.url} does not answer as a server with batches does")
    return found


def _checked(answer: httpx.Response) -> None:
    """Raise the error of an answer, in the server's own words where it has some."""
    if not answer.is_error:
        return
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = "no reason given"
    raise (NotFound if answer.status_code == 404 else InputError)(f"{message} ({answer.status_code})")


def _pairs(given: list[str] | tuple[str, ...]) -> dict[str, str]:
    pairs = dict(each.partition("=")[::2] for each in given)
    if any("=" not in each for each in given):
        raise InputError("--metadata is KEY=VALUE")
    return pairs


def _plain(name: str) -> str:
    """Return an id that may stand in a path."""
    if not name.replace("_", "").replace("-", "").isalnum() or not name.isascii():
        raise InputError(f"{name!r} is no id of a batch")
    return name


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
