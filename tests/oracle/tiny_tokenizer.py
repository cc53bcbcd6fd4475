"""A tokenizer of single characters, for folders of tiny models."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models


def write_tokenizer(path: Path, size: int) -> None:
    """tokenizer.json with ``size`` tokens, in the folder."""
    vocab = {chr(0x21 + index): index for index in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
