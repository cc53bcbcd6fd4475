"""Text to token ids and back, on the `tokenizers` library.

Two spellings of a vocabulary exist. *Byte-level* (GPT-2): a token is a string over 256 printable
characters, each standing for a byte. *SentencePiece-style*: a token is text with ``▁`` for a space,
and ``<0xNN>`` for bytes that no other token covers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from octavo.loader.apart import Apart, ApartError
from octavo.loader.base import Rendered, TokenizerError
from octavo.loader.encoder import Encoder

SPACE = "▁"  # U+2581, SentencePiece's space

# Tokens that end a turn in the chat formats in use, for files that name only one of them.
END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|END_OF_TURN_TOKEN|>",
)


def byte_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the rest U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


_BYTE_OF = {ord(char): byte for byte, char in byte_alphabet().items()}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one written in other characters stands for its own text."""
    try:
        return bytes([_BYTE_OF[ord(char)] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()


# What people call the two spellings.
KINDS: dict[Callable[[str], bytes], str] = {
    byte_level_bytes: "byte-level BPE",
    sentencepiece_bytes: "SentencePiece-style BPE",
}


def pipeline(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of tokenizer.json that a text goes through before it is merged."""
    return {key: tokenizer.get(key) for key in ("normalizer", "pre_tokenizer")}


class BpeTokenizer:
    """A byte-pair-encoding tokenizer; implements `octavo.loader.base.Tokenizer`.

    ``verbatim`` are the added tokens whose bytes are their own text, whatever the spelling;
    ``control`` are those that stand for no text at all, and so do ids below ``vocab_size`` (the
    model's) that the backend has no token for. ``before`` and ``after`` frame an encoded text.
    ``special_tokens_map`` has the texts of tokens that play a part (``bos_token``, …).

    ``unbounded`` is a pipeline (``normalizer``, ``pre_tokenizer`` of tokenizer.json) that may take
    any time and memory for a text: the backend has none, and texts are encoded in a process with
    limits (`EncoderApart`).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        to_bytes: Callable[[str], bytes],
        control: Iterable[int],
        verbatim: Iterable[int] = (),
        bos_token_id: int | None = None,
        before: Iterable[int] = (),
        after: Iterable[int] = (),
        eos_token_ids: Iterable[int] = (),
        strip_leading_space: bool = False,
        special_tokens_map: Mapping[str, str] | None = None,
        unbounded: Mapping[str, Any] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.kind = KINDS[to_bytes]
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self._backend = backend
        self._to_bytes = to_bytes
        self._control = frozenset(control)
        self._verbatim = frozenset(verbatim)
        self._before = list(before)
        self._after = list(after)
        # Added tokens beyond the embedding: of a picture, in a model's files for text only.
        self._beyond = backend.get_vocab_size() > vocab_size
        self.strip_leading_space = strip_leading_space
        self.special_tokens_map = dict(special_tokens_map or {})
        self._pipeline = unbounded
        self._encoder = (
            Encoder(backend, self._control)
            if unbounded is None
            else EncoderApart(self.backend_json(), self._control)
        )
        self._bytes: dict[int, bytes] = {}  # of the tokens seen: streaming asks for few, often

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """The tokens put before and after a text."""
        return self._before, self._after

    def backend_json(self) -> str:
        """How texts are cut and merged, as tokenizer.json says it; no decoder and no framing."""
        text = str(self._backend.to_str())
        return text if self._pipeline is None else json.dumps(json.loads(text) | self._pipeline)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `TokenizerError` for a text that the tokenizer fails on, and for a token that it
        has and the model has not; `UnicodeEncodeError` for lone surrogates, which no token spells.
        """
        text.encode()  # refuses lone surrogates, with their position
        try:
            if isinstance(text, Rendered):
                ids = self._encoder.chat_ids(str(text), text.origin, text.given)
            else:
                ids = self._encoder.ids(text)
        except ValueError as error:
            raise TokenizerError(f"the text cannot be tokenized: {error}") from None
        if self._beyond and max(ids, default=0) >= self.vocab_size:
            token = next(token_id for token_id in ids if token_id >= self.vocab_size)
            raise TokenizerError(
                f"token {self._backend.id_to_token(token)!r} ({token}) is not in the model's "
                f"vocabulary of {self.vocab_size}"
            )
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The joined bytes as UTF-8, faults replaced by U+FFFD; ids must be in the vocabulary.

        The space that some SentencePiece vocabularies put before a text that does not begin with
        one is taken off again.
        """
        parts = []
        first = True  # nothing shown yet: the next one carries the added space
        for token_id in token_ids:
            if skip_special_tokens and token_id in self._control:
                continue
            data = self._spelled(token_id)
            if first and self.strip_leading_space and data.startswith(b" "):
                data = data[1:]
            first = False
            parts.append(data)
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._control else self._spelled(token_id)

    def token_text(self, token_id: int) -> str:
        return self._spelled(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._control

    def _spelled(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            token = self.spelling(token_id)
            data = token.encode() if token_id in self._verbatim else self._to_bytes(token)
            self._bytes[token_id] = data
        return data

    def spelling(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._backend.id_to_token(token_id) or ""


class EncoderApart:
    """An `Encoder` in a process of its own: a text costs at most ``seconds``, and ``memory`` bytes
    beside the vocabulary."""

    def __init__(
        self,
        tokenizer: str,
        control: Iterable[int],
        *,
        seconds: float = 5.0,
        memory: int = 512 << 20,
    ) -> None:
        loading = memory + 100 * len(tokenizer)  # what the library makes of a file
        limits = {"seconds": seconds, "memory": memory, "loading": loading}
        hello = {"tokenizer": tokenizer, "control": sorted(control), "limits": limits}
        self._apart = Apart("octavo.loader.encoder_worker", hello, "tokenizer", quick=1, slow=2)

    def ids(self, text: str) -> list[int]:
        return self._ask({"text": text})

    def chat_ids(self, text: str, origin: bytes, given: str) -> list[int]:
        return self._ask({"text": text, "origin": origin.decode("latin-1"), "given": given})

    def _ask(self, request: dict[str, str]) -> list[int]:
        try:
            answer = self._apart.ask(json.dumps(request).encode())
        except ApartError as error:
            raise ValueError(str(error)) from None
        if "error" in answer:
            raise ValueError(answer["error"])
        ids: list[int] = answer["ids"]
        return ids
