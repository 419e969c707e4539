"""Tests of predictors of lengths of answers."""
