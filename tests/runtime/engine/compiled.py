"""A mark that skips tests of the kernels, with the reason, on machines that cannot compile them."""

from __future__ import annotations

import pytest

from runtime.engine.kernels.build import NoKernels, library

_FOUND = library()
needs_kernels = pytest.mark.skipif(isinstance(_FOUND, NoKernels), reason=f"KERNELS ARE NOT TESTED: {_FOUND}")
