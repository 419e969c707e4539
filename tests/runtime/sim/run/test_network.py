"""Simulated links: transfers wait for each other on shared links only, and messages keep their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.sim.cost.hardware import GPUS, ClusterHardware, LinkSpec, ServerSpec
from runtime.sim.run.network import ENVELOPE, Network

INSIDE, NET = LinkSpec("inside", 1e9, 10), LinkSpec("net", 1e8, 100)
CLUSTER = ClusterHardware(
    (ServerSpec(GPUS["A10"], 2, INSIDE), ServerSpec(GPUS["A10"], 2, INSIDE), ServerSpec(GPUS["A10"], 1, INSIDE)), NET
)


def test_times_by_hand():
    network = Network(CLUSTER)
    assert network.arrival("s0g0", "s0g1", 1000 - ENVELOPE, 0) == 1000 + 10
    assert network.arrival("s0g0", "s1g0", 1000 - ENVELOPE, 0) == 10_000 + 100
    assert (network.inside.nbytes, network.between.nbytes, network.between.ns) == (1000, 1000, 10_100)


def test_a_servers_link_is_shared_in_each_direction():
    network = Network(CLUSTER)
    first = network.arrival("s0g0", "s1g0", 1000 - ENVELOPE, 0)
    assert network.arrival("s0g1", "s2g0", 1000 - ENVELOPE, 0) == first + 10_000  # out of the same server
    assert network.arrival("s2g0", "s0g0", 1000 - ENVELOPE, 0) == first  # the other direction
    assert network.arrival("s1g1", "s1g0", 1000 - ENVELOPE, 0) == 1010  # inside
    assert network.arrival("s0g0", "s1g0", 1000 - ENVELOPE, 10**9) == 10**9 + first  # long after


ENDS = st.tuples(st.sampled_from(["s0g0", "s0g1", "s1g0", "s2g0"]), st.sampled_from(["s0g1", "s1g1", "s2g0"]))


@given(st.lists(st.tuples(ENDS, st.integers(0, 5000))))
def test_messages_between_two_devices_stay_in_order(sent: list[tuple[tuple[str, str], int]]):
    network = Network(CLUSTER)
    last: dict[tuple[str, str], int] = {}
    for now, ((source, to), nbytes) in enumerate(sent):
        there = network.arrival(source, to, nbytes, now)
        assert there > max(now, last.get((source, to), 0))
        last[source, to] = there


def test_devices_that_are_none_are_refused():
    with pytest.raises(KeyError):
        Network(CLUSTER).arrival("s0g0", "s9g9", 1, 0)
