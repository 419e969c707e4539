"""A device that reports a wrong number of tokens for a row ends that row's sequence with an error, and no other one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import RowsDone
from tests.runtime.scheduler.virtual_cluster import VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3 4* 5* 6")


@pytest.mark.parametrize("answer", [1, 4], ids=["prompt", "decode"])
@pytest.mark.parametrize("count", [-7, 0, 2, 500, 1 << 62])
def test_a_wrong_number_of_tokens_ends_that_sequence(count: int, answer: int) -> None:
    cluster = VirtualCluster([M], [(1, 3, 4)], devices=2)
    cluster.ask(request("bad", range(1, 6), "m", max_tokens=6), request("good", range(3), "m", max_tokens=6))
    tell, seen = cluster.tell, 0

    def lying(event: Any) -> None:
        nonlocal seen
        if isinstance(event, RowsDone) and "bad" in event.seqs:
            seen += 1
            if seen == answer:
                event = replace(
                    event,
                    counts=tuple(
                        count if seq == "bad" else one for seq, one in zip(event.seqs, event.counts, strict=True)
                    ),
                )
        tell(event)

    cluster.tell = lying  # type: ignore[method-assign]
    cluster.run()
    last = cluster.told["bad"].last
    assert last.finish == "error" and f"has run {count} tokens, of {5 if answer == 1 else 1}" in (last.error or "")
    del cluster.requests["bad"]
    cluster.expect()
