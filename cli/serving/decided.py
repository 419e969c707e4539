"""Settings that options of `zoo serve` decide, so that the tables of the configuration file leave them out."""

from __future__ import annotations

#: Settings of the dense executor, each with an option `--dense-NAME`.
DENSE = ("mode", "slots", "padding", "prompts")
#: Settings of a cluster that options of their own decide, or other options together.
SET_BY_OPTIONS = (
    "devices", "placement", "max_num_seqs", "prefill_chunk", "stride", "routing", "control", "speculation",
    "prefix_caching", "max_batch_per_block", "residency", "eviction", "dispatch", "shared_prompt_bytes", "order",
    "preemption_mode", "prefill_order", "prefill_window", "background_share", "roles", "role_changes", "decode",
    "lending",
)  # fmt: skip
