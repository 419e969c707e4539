"""Simulate the links of a cluster: when bytes sent now arrive, and how much traffic each kind of link carried.

A device's link inside its server, and a server's link to other servers in each direction, carry one transfer after the
other; later ones wait. So bandwidth is shared, and messages from one device to another arrive in the order in which
they were sent. The scheduler's own messages are small: they take a fixed latency and never wait (`control_ns`).

A hop carries the hidden states of the new tokens, as live (`new`), or those of the whole context of every row
(`context`): the reading of the paper's prototype, "without any optimization" of communication, that fits its Figure 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.messages import ForwardRows, Message
from runtime.sim.cost.hardware import ClusterHardware, LinkSpec

Hops = Literal["new", "context"]

#: Bytes of a message without its arrays.
ENVELOPE = 256


@dataclass(slots=True)
class LinkTraffic:
    """Traffic of one kind of link: messages, bytes, and transfer time with waiting, in ns."""

    messages: int = 0
    nbytes: int = 0
    ns: int = 0

    def add(self, nbytes: int, ns: int) -> None:
        self.messages += 1
        self.nbytes += nbytes
        self.ns += ns


class Network:
    """The links of a cluster. `inside`, `between`: traffic inside servers and between them."""

    def __init__(self, cluster: ClusterHardware, hops: Hops = "new") -> None:
        self._cluster = cluster
        self._hops = hops
        self._server = dict(cluster.devices())
        self._own_free = dict.fromkeys(self._server, 0)
        self._out_free = [0] * len(cluster.servers)
        self._in_free = [0] * len(cluster.servers)
        self.control_ns = cluster.control_ns
        self.inside = LinkTraffic()
        self.between = LinkTraffic()

    def server_of(self, device: str) -> int:
        return self._server[device]

    def link(self, source: str, to: str) -> LinkSpec:
        """Return the link from one device to another."""
        here = self._server[source]
        return self._cluster.servers[here].inside if here == self._server[to] else self._cluster.net

    def count(self, source: str, to: str, messages: int, nbytes: int, ns: int) -> None:
        """Count messages that take their time in a step and wait for no other ones."""
        traffic = self.inside if self._server[source] == self._server[to] else self.between
        traffic.messages += messages
        traffic.nbytes += nbytes + messages * ENVELOPE
        traffic.ns += ns

    def carried(self, message: Message, nbytes: int) -> int:
        """Return the bytes that a message carries whose arrays have `nbytes` for the new tokens of its rows."""
        if self._hops == "new" or not isinstance(message, ForwardRows):
            return nbytes
        new = sum(message.counts)
        return nbytes * (new + sum(message.starts)) // new if new else nbytes

    def arrival(self, source: str, to: str, nbytes: int, now: int) -> int:
        """Return when bytes that device `source` sends to device `to` now arrive, in ns.

        Raises KeyError for unknown devices.
        """
        nbytes += ENVELOPE
        here, there = self._server[source], self._server[to]
        if here == there:
            link = self._cluster.servers[here].inside
            over = max(now, self._own_free[source]) + link.busy_ns(nbytes)
            self._own_free[source] = over
            self.inside.add(nbytes, over + link.latency - now)
        else:
            link = self._cluster.net
            over = max(now, self._out_free[here], self._in_free[there]) + link.busy_ns(nbytes)
            self._out_free[here] = self._in_free[there] = over
            self.between.add(nbytes, over + link.latency - now)
        return over + link.latency
