"""What every checkpoint reader hands over, whatever the file format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.loader.template_text import CONTENT
from octavo.models.config import ModelConfig


class CheckpointError(ValueError):
    """A file that cannot be served; the message names the file and what is wrong with it."""


class WeightFormat(IntEnum):
    """How a weight's numbers are stored. Values equal ggml's type numbers (GGUF specification).

    Those from 1000 on are no file's. I2 to I8: integers of so many bits with a scale and a zero for
    a group of inputs, into which the layouts of GPTQ, AWQ and compressed-tensors are brought. NVFP4
    and E4M3: floats of 4 and 8 bits with scales (all of these: `Weight`). T3 and T4: codes of 3 and
    4 bits into a table, as which the native executor holds the formats whose numbers are points of
    a grid (executor/native/held_form.py).
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    I2 = 1002
    I3 = 1003
    I4 = 1004
    I8 = 1008
    T3_IQ1 = 1031
    T3_IQ2 = 1032
    T4_IQ3_XXS = 1041
    T4_IQ3_S = 1042
    NVFP4 = 1044
    E4M3 = 1080

    @property
    def in_gguf(self) -> bool:
        """Whether it is one of ggml's."""
        return self < 1000

    @property
    def grouped(self) -> bool:
        """Whether a weight of it has a group size of its own."""
        return WeightFormat.I2 <= self <= WeightFormat.I8


Bytes = npt.NDArray[np.uint8]


class MadeRows(NamedTuple):
    """Bytes that no file has as they are to be read: made for some rows when asked for, not kept.

    ``make(first, last)`` gives rows ``first`` to ``last`` of the outermost dimension, each of
    ``row_bytes``, in a new array.
    """

    length: int  # rows
    row_bytes: int
    make: Callable[[int, int], Bytes]

    @property
    def nbytes(self) -> int:
        return self.length * self.row_bytes


class Stored(NamedTuple):
    """What a weight is in its file, and the bytes that takes, if not those of its format."""

    format: str
    nbytes: int


class Weight(NamedTuple):
    """One stored weight: a read-only byte view into the (mapped) file, or bytes made when read.

    A matrix is [out, in], each row a whole number of blocks along ``in``; rows are contiguous.
    A vector (norm, bias) is F32 whatever the file has.

    A row of a grouped format is, one after another: a scale, fp32, for each group of ``group``
    inputs (the last may be shorter); a zero, one byte, for each; the numbers, b bits each, as a
    stream of bits from the lowest of the first byte on. w = scale * (number - zero).

    A row of E4M3 is a scale, fp32, for each group of ``group`` inputs, then a byte for each input,
    an fp8 number (OCP 8-bit floating point). w = scale * number. A row of NVFP4 is a scale, fp32,
    then for each 32 inputs two E4M3 scales of 16 and 16 bytes of E2M1 numbers, two in each, the
    first in the low half. w = scale * (E4M3 scale * number).
    """

    name: str  # as the file calls it, for error messages
    format: WeightFormat
    shape: tuple[int, ...]  # outermost first
    source: Bytes | MadeRows
    # Inputs that share a scale: a multiple of 32, or all (grouped formats); of 16, or more than all
    # (E4M3).
    group: int = 0
    # The matrix's input i is element order[i] of the activations (GPTQ's activation order).
    order: npt.NDArray[np.int32] | None = None
    stored_as: Stored | None = None

    @property
    def data(self) -> Bytes:
        """All bytes. They may be made anew: ask once, and not for longer than they are needed."""
        if isinstance(self.source, MadeRows):
            return self.source.make(0, self.source.length)
        return self.source

    @property
    def nbytes(self) -> int:
        """The bytes of `data`. Makes nothing."""
        return self.source.nbytes

    @property
    def stored(self) -> Stored:
        """What it is in the file, for people, and the bytes it takes there."""
        return self.stored_as or Stored(self.format.name, self.nbytes)

    def rows(self, first: int, last: int) -> Bytes:
        """The bytes of rows ``first`` to ``last`` of the outermost dimension."""
        if isinstance(self.source, MadeRows):
            return self.source.make(first, last)
        row_bytes = self.nbytes // self.shape[0]
        return self.source[first * row_bytes : last * row_bytes]

    def split(self, rows: list[int]) -> list[Weight]:
        """Consecutive rows, as views where the file has them; ``rows`` add up to all of them."""
        parts, first = [], 0
        for count in rows:
            parts.append(self._part(first, count))
            first += count
        return parts

    def take(self, rows: npt.NDArray[np.intp]) -> Weight:
        """Return some rows in another order: made when asked for."""

        def make(first: int, last: int) -> Bytes:
            wanted = rows[first:last]
            cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
            runs = (run for run in np.split(wanted, cuts) if len(run))
            return np.concatenate([self.rows(run[0], run[-1] + 1).reshape(-1) for run in runs])

        count = len(rows)
        stored = self.stored_as
        if stored is not None:
            stored = stored._replace(nbytes=stored.nbytes * count // self.shape[0])
        source = MadeRows(count, self.nbytes // self.shape[0], make)
        return self._replace(shape=(count, *self.shape[1:]), source=source, stored_as=stored)

    def stacked(self, parts: int = 1) -> list[list[Weight]]:
        """Return each matrix of a stack [count, rows, in], cut into so many of equal rows."""
        count, rows = self.shape[:2]
        if len(self.shape) != 3 or rows % parts:
            raise ValueError(f"tensor {self.name!r} of shape {list(self.shape)} is no such stack")
        flat = self._replace(shape=(count * rows, self.shape[2]), source=self.data)
        matrices = flat.split([rows // parts] * (count * parts))
        return [matrices[i : i + parts] for i in range(0, count * parts, parts)]

    def _part(self, first: int, count: int) -> Weight:
        source: Bytes | MadeRows
        if isinstance(self.source, MadeRows):
            make = self.source.make
            source = self.source._replace(
                length=count, make=lambda a, b: make(first + a, first + b)
            )
        else:
            source = self.rows(first, first + count)
        stored = self.stored_as
        if stored is not None:
            before, until = (stored.nbytes * row // self.shape[0] for row in (first, first + count))
            stored = stored._replace(nbytes=until - before)
        shape = (count, *self.shape[1:])
        return self._replace(shape=shape, source=source, stored_as=stored)


class Quantization(NamedTuple):
    """How a checkpoint's writer made its numbers small, as its configuration says."""

    method: str  # "gptq", "awq", ...
    layout: str  # of the tensors, as the configuration calls it
    bits: tuple[int, ...]  # several where modules differ
    group_sizes: tuple[int, ...]  # inputs that share a scale; -1: all of them
    symmetric: bool  # no zeros of their own
    activation_order: bool
    activations: str | None = None  # what is asked of them, and done


class Tokenizer(Protocol):
    """Text to token ids and back. Thread-safe."""

    vocab_size: int
    bos_token_id: int | None
    kind: str  # how tokens are spelled, for people
    eos_token_ids: frozenset[int]  # every token that ends a turn, resolved once at load

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written in the text are recognised, in a `Rendered` one those only that
        the chat template wrote; BOS is added if the model wants it. Raises `TokenizerError`."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; b"" for control tokens. For incremental decoding."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token as shown in logprobs."""
        ...

    def spelling(self, token_id: int) -> str:
        """The token as the vocabulary writes it, special ones too; "" for an id it has none for."""
        ...

    def is_special(self, token_id: int) -> bool: ...


class TokenizerError(ValueError):
    """The tokenizer cannot encode a text; the message says why, and quotes no path."""


class Rendered(str):
    """A chat as its template rendered it, and who wrote which character of it.

    ``origin`` has a byte for each character: `TEMPLATE`, `CONTENT` (of the messages and whatever
    else was given), or `UNKNOWN` where the template did something to strings that is not followed.
    ``given`` is all text that was given, for what is unknown. A slice is a plain `str`, in which
    every control token is recognised, whoever wrote it.
    """

    origin: bytes
    given: str

    def __new__(cls, text: str, origin: bytes, given: str) -> Rendered:
        self = super().__new__(cls, text)
        self.origin, self.given = origin, given
        return self


def head(text: str, end: int, more: str) -> str:
    """The first ``end`` characters of a chat, and ``more``, which the messages' author wrote."""
    found = text[:end] + more
    if not isinstance(text, Rendered):
        return found
    return Rendered(found, text.origin[:end] + CONTENT * len(more), text.given)


class ChatTemplate(Protocol):
    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        """The prompt text, `Rendered` if it is known who wrote what. Raises `ChatTemplateError`
        with the template's own message."""
        ...


class ChatTemplateError(ValueError):
    """The template refused the messages, failed, or ran too long."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model ready to be loaded. ``weights`` maps the Program's roles to stored weights.

    ``path`` is a GGUF file or a Hugging Face folder, ``file_bytes`` what its weights' files take.

    ``release`` gives memory back when weights have been repacked, as often as is wanted: the file's
    pages, and what loading left behind. The weights stay readable, from the file again.
    """

    path: Path
    config: ModelConfig
    weights: dict[str, Weight]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    release: Callable[[], None] = field(default=lambda: None, repr=False)
    file_bytes: int = 0
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()  # what was decided about the files, to be said at load
    # As generation_config.json has it (engine/sampling_defaults.py).
    generation_config: dict[str, Any] = field(default_factory=dict)
    # Reads what the layer for multi-token prediction has beside ``weights``. Raises
    # `CheckpointError`, and `ValueError` where the model has no such layer.
    mtp_weights: Callable[[], dict[str, Weight]] = field(default=dict, repr=False)


def require_chat(checkpoint: Checkpoint) -> ChatTemplate:
    """Its template. Raises `ChatTemplateError` for a model that was not taught to chat."""
    if checkpoint.chat_template is None:
        raise ChatTemplateError(
            f"{checkpoint.path.name} has no chat template: it is not a chat model; octavo generate "
            "(LLM.generate) continues a text"
        )
    return checkpoint.chat_template
