"""The integer engine with direct links, for tests: gloo carries its integers as it does tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.config import DirectConfig
from runtime.engine.fakes.integer_engine import IntegerEngine

if TYPE_CHECKING:
    from runtime.engine.tensors.links import DirectLinks


class LinkedIntegerEngine(IntegerEngine):
    """`IntegerEngine` as a `runtime.transport.interfaces.Connectable`. It imports torch only in `direct`."""

    def direct(self, config: DirectConfig, host: str = "") -> DirectLinks:
        from runtime.engine.tensors.links import DirectLinks
        from runtime.engine.tensors.process_groups import Gloo

        return DirectLinks(Gloo(host), config, as_bytes=True)
