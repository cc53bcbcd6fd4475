"""HTTP: OpenAI routes, limits, metrics, life cycle."""
