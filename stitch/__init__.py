"""Stitching blocks between models of different width (BL-09): training, scoring, and storing them in the zoo.

    from stitch import StitchSettings, train_stitch

    report = train_stitch(zoo, "small", "wide", StitchSettings(steps=800))

Serving and composing do not need this package: a stored stitch is `surgery.chains.stitches`, its module
`surgery.modules.components.Stitch`.
"""

from stitch.settings import StitchSettings
from stitch.stitching import StitchReport, train_stitch

__all__ = ["StitchReport", "StitchSettings", "train_stitch"]
