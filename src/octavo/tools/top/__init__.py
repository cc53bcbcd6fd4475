"""A running server as its operator sees it: /metrics and /requests, read, reckoned and drawn."""
