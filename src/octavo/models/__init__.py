"""What a network is: its shape (`ModelConfig`) and its computation (`Program`)."""
