"""Run a private RabbitMQ broker: its own node, ports, folder and cookie on the loopback, removed afterwards.

The machine's own broker is never used.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.queueing.broker import INTERACTIVE, LINES

_BINARIES = Path("/usr/lib/rabbitmq/bin")
_START_SECONDS = 90.0
#: Seconds; RabbitMQ 3.10 forgets a quorum queue if it is killed within some seconds of the queue's declaration.
SETTLED = 6.0


def find_server() -> Path | None:
    """Return the program of the broker."""
    program = _BINARIES / "rabbitmq-server"
    return program if program.exists() and shutil.which("erl") else None


@dataclass
class Broker:
    """A broker that may be killed and started again with what it had."""

    program: Path
    root: Path
    port: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def start(self) -> None:
        with (self.root / "out").open("ab") as out:
            self.process = subprocess.Popen(
                [str(self.program)], env=self.environment, stdout=out, stderr=out, start_new_session=True, cwd=self.root
            )
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the broker ended: {(self.root / 'out').read_text()[-2000:]}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                    probe.sendall(b"AMQP\0\0\x09\x01")
                    if probe.recv(1):
                        return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the broker did not start")

    def purge(self) -> None:
        """Empty the queues of servers."""
        asyncio.run(_purge(self.url))

    def unacknowledged(self, queue: str) -> int:
        """Return the messages of a queue, those included that servers hold."""
        command = [str(_BINARIES / "rabbitmqctl"), "--quiet", "list_queues", "name", "messages", "--no-table-headers"]
        found = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, cwd=self.root)
        return int(dict(line.split() for line in found.stdout.splitlines())[queue])

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


@contextmanager
def broker(program: Path, consumer_timeout_ms: int = 1_800_000) -> Iterator[Broker]:
    """Run a broker until the block ends. `consumer_timeout_ms`: for which a consumer may hold a message."""
    root = Path(tempfile.mkdtemp(prefix="rabbit-"))
    ports = _free_ports(3)
    (root / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{ports[0]}\nlog.file.level = warning\n")
    (root / "advanced.config").write_text(
        f"[{{rabbit, [{{consumer_timeout, {consumer_timeout_ms}}}, {{channel_tick_interval, 500}}]}}].\n"
    )
    (root / "plugins").write_text("[].\n")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))},
        "HOME": str(root),
        "RABBITMQ_NODENAME": f"zoo{os.getpid()}@localhost",
        "RABBITMQ_NODE_PORT": str(ports[0]),
        "RABBITMQ_DIST_PORT": str(ports[1]),
        "ERL_EPMD_PORT": str(ports[2]),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_CONFIG_FILE": str(root / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(root / "advanced.config"),
        "RABBITMQ_CONF_ENV_FILE": str(root / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(root / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(root / "mnesia"),
        "RABBITMQ_LOG_BASE": str(root / "log"),
        "RABBITMQ_PID_FILE": str(root / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2",
    }
    made = Broker(program, root, ports[0], environment)
    # A node would start its name service as a daemon, which would outlive it.
    names = subprocess.Popen(["epmd", "-port", str(ports[2])], env=environment, cwd=root)
    try:
        made.start()
        yield made
    finally:
        made.kill()
        names.kill()
        names.wait(30)
        shutil.rmtree(root, ignore_errors=True)


async def _purge(url: str) -> None:
    import aio_pika

    connection = await aio_pika.connect(url)
    async with connection:
        for name in (INTERACTIVE, LINES):
            channel = await connection.channel()
            with suppress(aio_pika.exceptions.ChannelClosed):  # it was never declared
                await (await channel.get_queue(name)).purge()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
