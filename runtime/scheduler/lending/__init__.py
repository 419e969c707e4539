"""Loans: page sets of running sequences that lie on devices that are not on their path (Infinite-LLM)."""
