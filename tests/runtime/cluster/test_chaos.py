"""`kill -9` at random moments under load, while sequences move: no request is lost, doubled or altered.

No page leaks either. The benchmark of the same name makes a hundred kills and prints recovery times; this is its
quick version.
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
