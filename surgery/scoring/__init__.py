"""What scoring two models is made of: what is held against what, distributions streamed by vocabulary, sums that can be
resumed.

`surgery.scoring.compare` puts it together.
"""
