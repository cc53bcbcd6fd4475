"""From logits to tokens: parameters and sampler."""
