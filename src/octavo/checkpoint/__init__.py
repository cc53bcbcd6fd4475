"""Where weights, tokenizer and chat template come from."""
