"""The model as the routes see it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from octavo.loader.base import ChatTemplate, Tokenizer, TokenizerError
from octavo.server.errors import ApiError


def public_name(model: str | Path) -> str:
    """Return what clients may know of a model argument: a known name or a Hugging Face id as it
    is, and the last part of a local path, which may be a link's own name.
    """
    path = Path(model).expanduser()
    return os.path.basename(os.path.abspath(path)) if path.exists() else str(model)


def utf8(name: str) -> str:
    """Return the name as JSON and metrics can hold it: an argument's bytes need not be UTF-8."""
    return os.fsencode(name).decode(errors="replace")


@dataclass(frozen=True)
class ServedModel:
    """``names``: those that requests may use; answers carry the first."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int  # tokens, prompt and answer together
    root: str = ""  # the name of the file or folder it was loaded from, without its path
    control_tokens_in_content: bool = False  # of messages; else they are text there
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # of `SamplingParams`
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def longest_list(self) -> int:
        """Entries of a list in a request: the tokens of a context, or all there are."""
        return max(self.max_model_len, self.tokenizer.vocab_size)

    def fitting(self, max_tokens: int, num_prompt_tokens: int) -> int:
        """Return a default of max_tokens, cut to the context. One that was asked for is not cut."""
        room = self.max_model_len - num_prompt_tokens
        return min(max_tokens, room) if room > 0 else max_tokens

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(404, f"the model {name!r} does not exist here", "model")

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise `ApiError` 400 naming the first id outside the vocabulary."""
        size = self.tokenizer.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= size):
            bad = next(token for token in token_ids if not 0 <= token < size)
            raise ApiError(
                400, f"{param}: token id {bad} is outside the vocabulary of {size}", param
            )

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids. Raises `ApiError` 400 for a text that the tokenizer cannot encode."""
        self.check_length(len(text), param)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise ApiError(400, f"{param}: {error}", param) from None

    def check_length(self, characters: int, param: str) -> None:
        """Refuse a text that no tokenization makes short enough, before it is tokenized.

        Raises `ApiError` 400 with the arithmetic.
        """
        # Most texts are so short that the longest token need not be known.
        if characters <= self.max_model_len:
            return
        most = self.max_model_len * self._longest_token
        if characters > most:
            raise ApiError(
                400,
                f"{param} has {characters} characters: more than the context of "
                f"{self.max_model_len} tokens can hold ({most} characters)",
                param,
            )

    @cached_property
    def _longest_token(self) -> int:
        """The most characters that one token stands for."""
        tokenizer = self.tokenizer

        def length(token: int) -> int:
            spelled = tokenizer.token_text(token) if tokenizer.is_special(token) else ""
            return max(1, len(tokenizer.token_bytes(token)), len(spelled))

        return max(map(length, range(tokenizer.vocab_size)))

    # Tokens as logprobs show them, remembered: the likely ones come again and again.

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        return lru_cache(1 << 14)(self.tokenizer.token_text)

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        return lru_cache(1 << 14)(self.tokenizer.token_bytes)

    @cached_property
    def token_key(self) -> Callable[[int], str]:
        """The text, or the bytes of a part of a character, spelled as OpenAI spells them: as text,
        all parts look the same.
        """

        def key(token_id: int) -> str:
            data = self.token_bytes(token_id)
            try:
                data.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            return self.token_text(token_id)

        return lru_cache(1 << 14)(key)
