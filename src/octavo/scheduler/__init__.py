"""Who runs next: request life cycle and scheduler."""
