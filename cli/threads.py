"""How the threads of torch's products wait for one another, where a server shares few cores with them. To be set before torch is loaded.

Knows no torch: it is one variable of the environment, which libgomp reads once.
"""

from __future__ import annotations

from collections.abc import MutableMapping

#: What a user may have said about it already: OpenMP's own variable, GNU's and Intel's.
_SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
#: Measured with two cores (docs/measurements.md, "Through HTTP"). With many, one that spins is missed by nobody.
_FEW = 4


def yield_cores(environment: MutableMapping[str, str], cores: int) -> None:
    """Have waiting threads sleep and not spin, where cores are few and nobody has said otherwise.

    Between two products a thread that spins holds a core that the event loop, and clients on the same machine, need.
    """
    if cores <= _FEW and not any(name in environment for name in _SAID):
        environment["OMP_WAIT_POLICY"] = "passive"
