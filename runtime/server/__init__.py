"""The HTTP surface: OpenAI's endpoints, health, metrics and the zoo's own routes. No torch, no scheduling."""
