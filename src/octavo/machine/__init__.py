"""What the machine below the engine can do."""
