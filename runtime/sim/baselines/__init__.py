"""Baselines of BlockLLM's evaluation, without this project's scheduler: engines that are deployed apart."""
