"""Answers in OpenAI's shapes: JSON bodies, server-sent events, errors."""
