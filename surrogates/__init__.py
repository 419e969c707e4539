"""Cheaper stand-ins for blocks (BL-10): pruned and recovered, or taken from a smaller model.

    from surrogates import SurrogateOptions, make_surrogate
    report = make_surrogate(zoo, "base", (4, 6), SurrogateOptions(part="layer", ratio=0.5))

A stand-in is scored and timed, and stored with its scored pair.
"""

from surrogates.cheaper import make_from
from surrogates.making import make_surrogate, plan_surrogate
from surrogates.options import SurrogateOptions, SurrogateReport
from surrogates.recovery.recover import RecoverySettings

__all__ = ["RecoverySettings", "SurrogateOptions", "SurrogateReport", "make_from", "make_surrogate", "plan_surrogate"]
