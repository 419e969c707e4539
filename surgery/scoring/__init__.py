"""Scoring two models: pairs of parts, distributions computed by slices of the vocabulary, resumable sums.

`surgery.scoring.compare` combines these.
"""
