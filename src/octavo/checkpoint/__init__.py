"""Where weights, tokenizer and chat template come from."""

from octavo.checkpoint.loader import load

__all__ = ["load"]
