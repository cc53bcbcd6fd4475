"""The loop that ties the rooms together, sync and async."""
