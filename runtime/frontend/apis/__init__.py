"""Bodies of the endpoints beside OpenAI's two generating ones, built on the bounds of those (`frontend.schemas`)."""
