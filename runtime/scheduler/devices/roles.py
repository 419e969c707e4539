"""Which phases each device runs, by name: a role outlives the device's agents (TI-04).

Contract: data. `apart` is False as long as every device runs everything; then nothing depends on roles. A device that
is leaving its role ends what runs there and gets nothing new (TI-25, TI-26); roles that are given by hand stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.policy.roles.role import BOTH, ROLES, Role
from runtime.role_config import RoleName


class DeviceRoles:
    """Roles by device; a device without one runs everything.

    Attributes:
        apart: Whether any device does not run everything.
        leaving: Devices that get nothing new, with the role that each gets when what runs there has ended.
        changes: Changes of roles so far.
    """

    def __init__(self, roles: Iterable[tuple[str, str]] = ()) -> None:
        self._roles = {device: ROLES[name] for device, name in roles}
        self.apart = any(role != BOTH for role in self._roles.values())
        self.leaving: dict[str, RoleName] = {}
        self.changes = 0

    def __getitem__(self, device: str) -> Role:
        return self._roles.get(device, BOTH)

    def among(self, devices: Iterable[str]) -> Mapping[str, Role]:
        """Return the roles of these devices."""
        return {device: self[device] for device in devices}

    def change(self, roles: Mapping[str, str]) -> None:
        """Give devices other roles; any other change that was under way is over."""
        self.leaving.clear()
        self.changes += 1
        self._roles.update((device, ROLES[name]) for device, name in roles.items())
        self.apart = any(role != BOTH for role in self._roles.values())
