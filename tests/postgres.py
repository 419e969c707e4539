"""A private PostgreSQL cluster for tests: made with initdb, reached by a Unix socket, removed afterwards.

The machine's own server is never used.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, make_url, text

_numbers = itertools.count()


def find_binaries() -> Path | None:
    """Return the folder with initdb and pg_ctl, newest version first."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    if found:
        folders.append(Path(found).parent)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@contextmanager
def cluster(binaries: Path) -> Iterator[str]:
    """Run a cluster and yield the URL of its first database; tests create more databases in it."""
    root = Path(tempfile.mkdtemp(prefix="pg-"))  # not pytest's folder: a socket's path has at most 107 characters
    data = root / "data"
    user = _unprivileged(root)
    try:
        _run(
            [binaries / "initdb", "-D", data, "-U", "zoo", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"], user
        )
        options = f"-k {root} -c listen_addresses='' -c fsync=off"
        _run([binaries / "pg_ctl", "-D", data, "-w", "-t", "60", "-l", root / "log", "-o", options, "start"], user)
        try:
            yield f"postgresql+psycopg://zoo@/postgres?host={root}"
        finally:
            _run([binaries / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop"], user)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def new_database(server: str) -> str:
    """Make an empty database in a cluster; return its URL."""
    name = f"zoo{next(_numbers)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def _unprivileged(root: Path) -> dict[str, Any]:
    """Return the user to run as: PostgreSQL refuses root, so then another user is taken and owns the folder."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    os.chown(root, entry.pw_uid, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _run(command: list[str | Path], user: dict[str, Any]) -> None:
    # To a file, not a pipe: the server inherits it and would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, cwd="/", check=False, timeout=120, **user
        )
        output.seek(0)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed: {output.read().decode(errors='replace')}")
