"""Text to token ids and back, on the `tokenizers` library.

Two spellings of a vocabulary exist. *Byte-level* (GPT-2): a token is a string over 256 printable
characters, each standing for a byte. *SentencePiece-style*: a token is text with ``▁`` for a space,
and ``<0xNN>`` for bytes that no other token covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenizers import Tokenizer as Backend

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


class BpeTokenizer:
    """A byte-pair-encoding tokenizer; implements `octavo.checkpoint.base.Tokenizer`.

    ``verbatim`` are the added tokens whose bytes are their own text, whatever the spelling;
    ``control`` are those that stand for no text at all, and so do ids below ``vocab_size`` (the
    model's) that the backend has no token for. ``before`` and ``after`` frame an encoded text.
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
        self._bytes: dict[int, bytes] = {}  # of the tokens seen: streaming asks for few, often

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """The tokens put before and after a text."""
        return self._before, self._after

    def backend_json(self) -> str:
        """How texts are cut and merged, as tokenizer.json says it; no decoder and no framing."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `ValueError` for text with lone surrogates, which no token can spell, and for a
        token that the tokenizer has and the model has not."""
        text.encode()  # refuses lone surrogates, with their position
        # The batch call is the one that lets go of the GIL.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._beyond and max(ids, default=0) >= self.vocab_size:
            token = next(token_id for token_id in ids if token_id >= self.vocab_size)
            raise ValueError(
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
            if token_id in self._control:
                if not skip_special_tokens:
                    parts.append(self.token_text(token_id).encode())
                    first = False
                continue
            data = self.token_bytes(token_id)
            if first and self.strip_leading_space and data.startswith(b" "):
                data = data[1:]
            first = False
            parts.append(data)
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spelled(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        if token_id in self._control:
            return self.spelling(token_id)
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._control

    def _spelled(self, token_id: int) -> bytes:
        if token_id in self._control:
            return b""
        token = self.spelling(token_id)
        return token.encode() if token_id in self._verbatim else self._to_bytes(token)

    def spelling(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._backend.id_to_token(token_id) or ""
