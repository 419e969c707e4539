"""Learn what copies of K and V to host memory and back cost, and what computing them again would (QL-11).

    copy       bytes, each way        at first the profile's link between host and device; without one nothing is known
                                      until a copy was measured, and a way never measured takes the other way's time
    recompute  chunks of a prompt     at first the profile's time of a chunk, or its weights times tokens; measured
                                      steps scale it, also with the context before a chunk

Agents report both (`AgentStats.copies`, `AgentStats.prompts`). Estimates are kept beside their outcomes
(`MeasuredTimes`, kinds `copy` and `prefill`).

Contract: it decides nothing; `policy.kv.preemption` does.
"""

from __future__ import annotations

from runtime.policy.measured_cost import MeasuredCost
from runtime.policy.profiles import DeviceProfile, LinkProfile
from runtime.scheduler.observe.measured_times import MeasuredTimes

#: Sizes at which an assumed rate stands for a link, in bytes.
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
#: Tokens of context in the unit of the second coordinate of recomputing.
_CONTEXT = 1000.0


class SwapCosts:
    """Costs of one cluster.

    Args:
        times: Keeps estimates and outcomes.
        profile: What `zoo profile` has measured; None for nothing.
        bandwidth: Bytes per second that estimates assume without a profile, until a copy was measured.
    """

    def __init__(self, times: MeasuredTimes, profile: DeviceProfile | None, bandwidth: float) -> None:
        self._times = times
        self._profiled = _link(profile, "device", "host") is not None
        self._copies = {
            True: MeasuredCost(_points(_link(profile, "device", "host"), bandwidth)),
            False: MeasuredCost(_points(_link(profile, "host", "device"), bandwidth)),
        }
        self._prefill = MeasuredCost([((1.0, 0.0), 1.0), ((1.0, 1.0), 1.0)])

    @property
    def copies_known(self) -> bool:
        """Whether a profile or a measured copy tells what copies take."""
        return self._profiled or any(each.count for each in self._copies.values())

    def copy_seconds(self, out: bool, nbytes: int) -> float:
        """Return the time of a copy to host memory (`out`) or back."""
        way, other = self._copies[out], self._copies[not out]
        found = other if not self._profiled and not way.count and other.count else way
        return found.at((1.0, float(nbytes)))

    def add_copy(self, now: int, out: bool, nbytes: int, seconds: float) -> None:
        """Add a measured copy."""
        self._times.record_outcome(now, "copy", self.copy_seconds(out, nbytes), seconds)
        self._copies[out].add((1.0, float(nbytes)), seconds)

    def chunk_seconds(self, assumed: float, before: int) -> float:
        """Return the time of a chunk behind `before` tokens, that takes `assumed` seconds by profile or weights."""
        return self._prefill.at((assumed, assumed * before / _CONTEXT))

    def add_chunk(self, now: int, assumed: float, before: int, seconds: float) -> None:
        """Add a measured chunk."""
        self._times.record_outcome(now, "prefill", self.chunk_seconds(assumed, before), seconds)
        self._prefill.add((assumed, assumed * before / _CONTEXT), seconds)


def _link(profile: DeviceProfile | None, a: str, b: str) -> LinkProfile | None:
    links = () if profile is None else profile.links
    return next((each for each in links if {each.a, each.b} == {a, b}), None)


def _points(link: LinkProfile | None, rate: float) -> list[tuple[tuple[float, float], float]]:
    if link is None:
        return [((1.0, size), size / rate) for size in _SIZES]
    return [((1.0, size), link.seconds(size)) for size in link.line.xs]
