"""`kill -9` at random moments under load, with sequences on the move: no request lost, none twice, none altered, no
page leaked.

The benchmark of the same name does it a hundred times and prints how long recovery takes; this is its quick version.
"""

from __future__ import annotations

from benchmarks.cluster.chaos import PAGES, chaos


def test_ten_kills_lose_nothing() -> None:
    outcome = chaos(kills=10, seed=7)
    assert outcome["kills"] == 10
    assert outcome["wrong"] == []
    assert outcome["lies"] == []
    assert outcome["requests"] > 10 and outcome["moves"]["committed"] > 0
    assert outcome["free"] == [PAGES] * 3
    assert outcome["health"] == "ok"
