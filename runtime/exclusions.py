"""Say why settings of a cluster exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.config import ClusterConfig


def without_lending(config: ClusterConfig) -> str | None:
    """Return why K and V cannot lie on devices that are not on the path with these settings; None if they can."""
    if config.dispatch != "placed":
        return "lending needs hops that the scheduler places (dispatch)"
    return None


def without_roles(config: ClusterConfig) -> str | None:
    """Return why devices cannot have roles with these settings; None if they can."""
    if config.speculation.mode != "off":
        return "roles and speculation exclude each other: a predicted hop would decode where its prompt ran"
    if config.dispatch != "placed":
        return "roles need hops that the scheduler places (dispatch): agents offer them to any device"
    return None
