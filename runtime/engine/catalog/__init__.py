"""Describe stored models to a scheduler: chains as blocks, variants, surrogates, profiles."""
