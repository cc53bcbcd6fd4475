"""What Octavo promises of its output, tried on one's own model, machine and settings."""
