"""A small hub on loopback: the routes that huggingface_hub calls to look up and download a model repository.

GET  /api/models/<id>[/revision/<rev>]      the repository's files
GET  /api/models/<id>/tree/<rev>            the same, with sizes
HEAD, GET /<id>/resolve/<rev>/<file>        a file, with ETag and X-Repo-Commit
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The hub's contents and what clients requested.

    Fields:
        repositories: Repository ID -> folder.
        gated: IDs of repositories that need the token.
        token: The token that opens gated repositories.
        requests: Requested paths, in order.
    """

    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_secret"  # noqa: S105
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def downloads(self) -> set[str]:
        """Return the names of the files that were requested."""
        return {path.split("/resolve/", 1)[1].split("/", 1)[1] for path in self.requests if "/resolve/" in path}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve on a free port of loopback while the context lasts."""

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers the routes listed in the module's docstring."""

    state: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(path)
        if path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self._file(*path.lstrip("/").split("/resolve/", 1))
        else:
            self._refuse(404, "")

    do_HEAD = do_GET

    def _info(self, rest: str) -> None:
        repo, _, route = rest.partition("/revision/") if "/revision/" in rest else rest.partition("/tree/")
        folder = self.state.repositories.get(repo)
        revision = route or "main"
        if folder is None:
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif "/tree/" in rest:
            self._answer([self._entry(folder, path) for path in self._paths(folder)])
        else:
            siblings = [{"rfilename": path} for path in self._paths(folder)]
            self._answer(
                {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False, "downloads": 0, "tags": []}
            )

    def _file(self, repo: str, rest: str) -> None:
        folder, name = self.state.repositories.get(repo), rest.split("/", 1)[1]
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        if repo in self.state.gated and self.headers.get("Authorization") != f"Bearer {self.state.token}":
            return self._refuse(403, "GatedRepo")
        if name not in self._paths(folder):
            return self._refuse(404, "EntryNotFound")
        data = (folder / name).read_bytes()
        return self._send(200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    @staticmethod
    def _paths(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    @staticmethod
    def _entry(folder: Path, path: str) -> dict[str, object]:
        data = (folder / path).read_bytes()
        return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}  # noqa: S324

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "request id 42\nat an inner address"})

    def _answer(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value.replace("\n", " "))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
