"""The length probe of a stage that is loaded, from the store (`zoo lengths --kind probe`, TI-10)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from runtime.chains import Stage
from surrogates.lengths.probe import LengthProbe
from surrogates.lengths.probe_storing import PROBE_ENDING, stored_probe
from zoo.errors import ZooError
from zoo.store import Store

_log = logging.getLogger(__name__)


def stage_probe(
    store: Store, model: str, part: Stage, widths: Sequence[int], device: torch.device
) -> LengthProbe | None:
    """Return the probe of a model if the state that it reads is made in this stage, counted from the stage's start.

    One that cannot be used is only a warning: answers are then not forecast.

    Args:
        model: The model's name, without a version; a chain that the store does not list has no probe.
        widths: Size of the hidden states that each component of the stage reads.
    """
    try:
        probe = stored_probe(store, model)
    except ZooError as error:
        _log.warning("lengths of %s's answers are not forecast: %s", model, error)
        return None
    if probe is None or not part.lo < probe.at <= part.hi:
        return None
    at = probe.at - part.lo
    later = probe.weight if probe.later is None else probe.later.weight
    if at < len(widths) and {widths[at]} != {probe.weight.shape[1], later.shape[1]}:
        _log.warning("lengths of %s's answers are not forecast: %s%s has another width", model, model, PROBE_ENDING)
        return None
    return probe.to(device, at)
