"""What quantizers learn from: token ids to run, and the second moments of matrices' inputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Tokenizer
from octavo.tools.quantize.grid import Float32, Float64
from octavo.tools.quantize.state import QuantizeError

LEAST = 16  # tokens that are worth a sample


class CalibrationError(QuantizeError):
    """A text that cannot be calibrated with; the message says why."""


def default_text() -> str:
    """Half a megabyte of English and code that every Python brings along: the topics of its
    language reference, which ``help()`` shows. Nothing has to be downloaded."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise CalibrationError(
            "this Python has no pydoc_data to calibrate with: name a text with --calibration"
        ) from None
    return "\n\n".join(text for _, text in sorted(topics.items()))


def samples(
    tokenizer: Tokenizer, text: str, count: int, length: int, where: str = "the text"
) -> npt.NDArray[np.int32]:
    """Token ids [samples, tokens]: up to ``count`` pieces of ``length`` tokens, spread evenly.

    Each begins as the tokenizer begins a prompt. A text of less than one piece is one shorter
    piece. Raises `CalibrationError` for a text of next to nothing.
    """
    try:
        with_start, ids = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    except ValueError as error:
        raise CalibrationError(f"{where} cannot be tokenized: {error}") from None
    start: list[int] = []
    if with_start[:1] != ids[:1] and tokenizer.bos_token_id is not None:
        start = [tokenizer.bos_token_id]
    if len(ids) < LEAST:
        raise CalibrationError(
            f"{where} has {len(ids)} tokens to calibrate with, fewer than {LEAST}"
        )
    size = min(length - len(start), len(ids))
    pieces = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if len(pieces) > count:
        pieces = [pieces[index * len(pieces) // count] for index in range(count)]
    return np.array([start + piece for piece in pieces], np.int32)


class Moments:
    """X Xᵀ of a linear layer's inputs over all tokens, and the mean magnitude of each."""

    def __init__(self, width: int) -> None:
        self.second: Float64 = np.zeros((width, width))
        self._magnitude: Float64 = np.zeros(width)
        self.count = 0  # rows

    def add(self, x: Float32) -> None:
        rows = x.reshape(-1, x.shape[-1])
        self.second += rows.T @ rows  # in fp32 for some thousand rows at a time
        self._magnitude += np.abs(rows).sum(axis=0, dtype=np.float64)
        self.count += len(rows)

    @property
    def magnitude(self) -> Float64:
        return self._magnitude / self.count

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(np.einsum("ii->i", self.second)).all())
