"""The HTTP server: OpenAI's endpoints, health, metrics and the zoo's own routes. No torch and no scheduling here."""
