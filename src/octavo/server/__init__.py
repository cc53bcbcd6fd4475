"""HTTP: OpenAI routes, limits, metrics, start and shutdown."""
