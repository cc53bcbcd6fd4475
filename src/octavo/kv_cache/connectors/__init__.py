"""KV connectors: KV blocks held outside the device's pool, one file for each place."""

# Names of the connectors in this folder, nearest first. Metrics have a value for each, also where
# an engine does not use it.
NAMES = ("host", "disk")
