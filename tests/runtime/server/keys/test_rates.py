"""The bound on requests per minute, by a clock of the test."""

from __future__ import annotations

from runtime.server.keys.rates import RequestBucket


def test_a_minute_of_requests_at_once_and_then_at_the_rate() -> None:
    bucket = RequestBucket(6, 100.0)
    assert [bucket.take_request(100.0) for _ in range(8)] == [None] * 6 + [10, 10]
    assert bucket.take_request(105.0) == 5
    assert bucket.take_request(110.0) is None and bucket.take_request(110.0) == 10
    assert [bucket.take_request(10_000.0) for _ in range(7)] == [None] * 6 + [10]


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = RequestBucket(1, 50.0)
    assert bucket.take_request(50.0) is None
    assert bucket.take_request(50.0) == bucket.take_request(40.0) == 60
