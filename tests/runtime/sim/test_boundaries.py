"""Moves in the simulator, with and without kept inputs of blocks, as the policy's table sets."""

from __future__ import annotations

from benchmarks.cluster.boundaries import moved
from runtime.sim.cost.hardware import LINKS
from runtime.sim.experiments.policy import policy_of
from runtime.sim.models.family import App, Cutting, family_of


def test_a_policy_says_how_many_bytes_are_kept() -> None:
    assert policy_of({"activation_cache_bytes": 1 << 30}, 2).agent.activation_cache_bytes == 1 << 30
    assert policy_of({}, 2).agent.activation_cache_bytes == 0


def test_a_slow_link_carries_hidden_states_in_the_place_of_k_and_v() -> None:
    family = family_of(
        [App("llama-7b", "llama-7b", "foundation")], Cutting(parts=2, page_layers=16, max_model_len=1024)
    )
    off, on = (moved(family, 2, LINKS["25gbps"], 512, kept) for kept in (0, 1 << 40))
    layers, token = 16, 2 * 4096  # bytes of a token's hidden states; K and V take twice that in each layer
    assert off["recomputed"] == 0 < on["recomputed"] < 512
    assert off["bytes"] >= 512 * 2 * layers * token
    assert on["bytes"] == on["recomputed"] * token + -(-(513 - on["recomputed"]) // 16) * 16 * 2 * layers * token
    assert on["ms"] < off["ms"]
