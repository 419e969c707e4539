"""A batch of token prompts that a client submits under a key, over the lives of servers, and its output file."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.queue.servers import KillableServer

_PAUSE = 0.05
_OPEN = ("validating", "in_progress", "finalizing")
#: Fields of an output line's body that differ between runs: times.
_TIMES = ("created",)


def batch_lines(seed: int, count: int, model: str, prompt: int, answer: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return lines with prompts of `prompt`/2 to `prompt` tokens; every second one is sampled."""
    draw = random.Random(1_000_003 * (seed + 1))
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": model,
                "prompt": [draw.randrange(10, vocabulary) for _ in range(draw.randint(prompt // 2, prompt))],
                "max_tokens": draw.randint(answer // 2, answer),
                "ignore_eos": True,
                "temperature": 0.9 if number % 2 else 0,
                "seed": number,
                "return_token_ids": True,
            },
        }
        for number in range(count)
    ]


@dataclass
class KeyedBatch:
    """A batch; `id` is "" until it is submitted, `file` that of its lines."""

    key: str
    lines: list[dict[str, Any]]
    id: str = ""

    def submit(self, server: KillableServer) -> None:
        """Upload the lines and begin the batch."""
        content = b"".join(json.dumps(line).encode() + b"\n" for line in self.lines)
        with server.http() as http:
            file = http.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})
            file.raise_for_status()
            order = {
                "input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h",
            }  # fmt: skip
            answer = http.post("/v1/batches", json=order, headers={"Idempotency-Key": self.key})
            answer.raise_for_status()
            self.id = answer.json()["id"]

    def wait_for(self, server: KillableServer, ended_lines: int | None = None) -> None:
        """Wait until so many lines have ended; None: for the batch's end."""
        with server.http() as http:
            while True:
                found = http.get(f"/v1/batches/{self.id}").json()
                counts = found["request_counts"]
                if found["status"] not in _OPEN:
                    return
                if ended_lines is not None and counts["completed"] + counts["failed"] >= ended_lines:
                    return
                time.sleep(_PAUSE)

    def output(self, server: KillableServer) -> list[bytes]:
        """Return the lines of the output file without times. Raises RuntimeError if there is none."""
        with server.http() as http:
            found = http.get(f"/v1/batches/{self.id}").json()
            if found["status"] != "completed" or found["output_file_id"] is None:
                raise RuntimeError(f"the batch is {found['status']}: {found['errors']}")
            content = http.get(f"/v1/files/{found['output_file_id']}/content").content
        return [_without_times(line) for line in content.splitlines()]


def _without_times(line: bytes) -> bytes:
    document = json.loads(line)
    for name in _TIMES:
        del document["response"]["body"][name]
    return json.dumps(document).encode()


def altered_lines(found: list[bytes], expected: list[bytes]) -> int:
    """Return how many lines of an output file are missing, too many, out of order, or not as expected."""
    places = {json.loads(line)["custom_id"]: line for line in found}
    differing = sum(places.get(json.loads(line)["custom_id"]) != line for line in expected)
    names = [json.loads(line)["custom_id"] for line in found]
    return max(differing, len(found) - len(expected), names != [json.loads(line)["custom_id"] for line in expected])
