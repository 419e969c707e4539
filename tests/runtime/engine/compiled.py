"""Whether the kernels can be compiled here; what needs them is skipped, and says so, where they cannot."""

from __future__ import annotations

import pytest

from runtime.engine.kernels.build import NoKernels, library

_FOUND = library()
needs_kernels = pytest.mark.skipif(isinstance(_FOUND, NoKernels), reason=f"KERNELS ARE NOT TESTED: {_FOUND}")
