"""Accuracy: tasks that need no network, lm-eval run on a stored model, and the documents stored of the results."""
