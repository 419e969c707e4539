"""The configurations of scheduler and agents that `zoo serve` ships; its options and the simulator both start here.

    cluster_config(serving, SHIPPED_CLUSTER)    agent_config(serving, SHIPPED_AGENT)

A default that only one of the two had would make the simulator measure something else than what is served
(`tests/cli/serving/test_shipped.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.config import AgentConfig, ClusterConfig, ControlConfig
from runtime.decode_config import DecodeConfig

#: An inline agent splits prompts over steps itself. It gets chunks of so many steps at once, so that few steps are half
#: full.
_STEPS = 4
#: Longest chunk of a prompt that is sent to an agent in another process, in tokens.
_CHUNK = 256
#: Decode credit of a device that launches steps ahead: it waits for the scheduler once per so many tokens.
_CREDIT = 8

#: Defaults of all options that are settings of the scheduler or of an agent. Of routing and placement the ones with the
#: least latency in docs/measurements/simulated.md are shipped, of hand-offs the one with the least time to the second
#: token (docs/measurements/tetri-decode.md).
SHIPPED_CLUSTER = ClusterConfig(residency="swap", routing="least-bytes", decode=DecodeConfig(grain="layer"))
SHIPPED_AGENT = AgentConfig()


@dataclass(frozen=True, slots=True)
class Serving:
    """What the configurations depend on.

    Fields:
        devices: Number of devices.
        inline: Whether the only device is run by an agent in the scheduler's thread.
        launches_ahead: Whether devices launch a step before the one under way is over, as GPUs do.
        decode_credit: Tokens of a sequence that a device may decode before it reports them; 0: by `launches_ahead`.
        chunk: Tokens of a prompt's chunk; 0: by `inline`.
    """

    devices: int = 1
    inline: bool = False
    launches_ahead: bool = False
    decode_credit: int = 0
    chunk: int = 0

    @property
    def credit(self) -> int:
        """Tokens that a device may decode before it reports: one, or more where steps are launched ahead."""
        return self.decode_credit or (_CREDIT if self.launches_ahead else 1)


def cluster_config(serving: Serving, chosen: ClusterConfig, max_num_batched_tokens: int) -> ClusterConfig:
    """Return the scheduler's configuration: the chosen one, with what follows from devices and backend.

    Raises ValueError for values that contradict each other.
    """
    tokens = max_num_batched_tokens
    shipped = _STEPS * tokens if serving.inline else min(tokens, _CHUNK)
    if chosen.prefill_order != "off":  # a chunk that several prompts fill is a step
        shipped = tokens
    return replace(
        chosen,
        devices=serving.devices,
        prefill_chunk=min(tokens, serving.chunk) if serving.chunk else shipped,
        stride=serving.credit,
        # Controllers move work between devices.
        control=ControlConfig.off() if serving.inline else chosen.control,
    )


def agent_config(serving: Serving, chosen: AgentConfig) -> AgentConfig:
    """Return the agents' configuration: the chosen one, with what follows from the backend."""
    return replace(chosen, chunk_prefill=serving.inline)
