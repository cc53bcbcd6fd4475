"""Text to token ids: the one place where the `tokenizers` library is given a text.

Whoever wrote the tokenizer's file decides what the library does here, so everything that it raises
or panics with becomes a `ValueError`. It runs in a process of its own, too, for files that may take
any time and memory (`octavo.loader.encoder_worker`).
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable
from functools import cached_property
from html import unescape
from typing import Any, NamedTuple, TypeVar

from tokenizers import AddedToken, Tokenizer

from octavo.loader.template_text import CONTENT, UNKNOWN

R = TypeVar("R")
# They stand for characters that cannot be part of a control token; a letter for a letter, as some
# tokens are whole words only.
_LETTER, _OTHER = "\N{LATIN LETTER TWO WITH STROKE}", "\ufdd2"


def guarded(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call the library. Raises `ValueError` for whatever goes wrong there."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # it raises plain Exception …
        raise ValueError(str(error)) from None
    except BaseException as error:  # … and panics, which are no Exception
        if type(error).__name__ != "PanicException":
            raise
        # A panic's message is about the library's insides.
        raise ValueError("the tokenizers library failed") from None


class _Found(NamedTuple):
    """A control token in a text, with the spaces that it takes along."""

    token_id: int
    start: int
    end: int


class Encoder:
    """``control`` are the added tokens that stand for no text. Thread-safe."""

    def __init__(self, backend: Tokenizer, control: Iterable[int]) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._control = {each: added[each] for each in control if each in added}
        unknown = getattr(backend.model, "unk_token", None)
        self._unknown = None if unknown is None else backend.token_to_id(unknown)
        self._blind: _Blind | None = None

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        texts = sorted((token.content for token in self._control.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def ids(self, text: str) -> list[int]:
        """Control tokens are recognised, whoever wrote them."""
        # The batch call is the one that lets go of the GIL.
        (encoding,) = guarded(self._backend.encode_batch_fast, [text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def chat_ids(self, text: str, origin: bytes, given: str) -> list[int]:
        """Control tokens are recognised where the chat template wrote them, as
        `octavo.loader.base.Rendered` has it. The ids are those of `ids` unless a control token
        would come of what others wrote.
        """
        ids, author = self.ids(text), _Author(origin, given)
        if all(
            self._clean(text, author, each, ids.count(each))
            for each in self._control.keys() & set(ids)
        ):
            return ids
        rightful = self._rightful(text, author)
        matched = [each for each in ids if each in self._control and each != self._unknown]
        if matched == [each.token_id for each in rightful] and self._found(text) == rightful:
            return ids
        if self._blind is None:
            self._blind = _Blind(self._backend, self._control)
        for broken in (None, self._spelled):
            ids = self._blind.ids(text, rightful, broken)
            spelled = self._control.keys() & set(ids) - {self._unknown}
            if not spelled:
                return self._blind.filled(ids, rightful)
        token = self._control[spelled.pop()].content
        raise ValueError(f"{token!r} is a control token that this tokenizer cannot spell out")

    def _clean(self, text: str, author: _Author, token_id: int, count: int) -> bool:
        """Whether the template wrote the token wherever the text has it, ``count`` times."""
        token = self._control[token_id].content
        at, found = text.find(token), 0
        while at >= 0:
            if not author.is_template(token, at):
                return False
            at, found = text.find(token, at + len(token)), found + 1
        return found == count

    def _rightful(self, text: str, author: _Author) -> list[_Found]:
        """The template's own control tokens: what is found when others' characters are hidden."""
        pieces, last = [], 0
        for run in re.finditer(b"\1+", author.origin):
            pieces += [text[last : run.start()], _hidden(text[run.start() : run.end()])]
            last = run.end()
        hidden = "".join([*pieces, text[last:]])
        rightful = []
        for found in self._found(hidden):
            token = self._control[found.token_id].content
            whole = hidden[found.start : found.end]
            first = found.start + max(whole.find(token), len(whole) - len(whole.lstrip()), 0)
            if author.is_template(token, first):
                rightful.append(found)
        return rightful

    def _found(self, text: str) -> list[_Found]:
        (encoding,) = guarded(self._backend.encode_batch, [text], add_special_tokens=False)
        return [
            _Found(token_id, start, end)
            for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if (token := self._control.get(token_id)) is not None
            # The unknown token stands for characters that no token spells, too.
            if token_id != self._unknown or token.content in text[start:end]
        ]


class _Blind:
    """The same vocabulary, seeing no control tokens but those that it is told of."""

    def __init__(self, backend: Tokenizer, control: dict[int, AddedToken]) -> None:
        copy = Tokenizer(backend.model)  # the model is shared, not copied
        if backend.normalizer is not None:
            copy.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            copy.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        for token_id, token in added.items():
            token.special = token_id in control
        copy.add_tokens([token for _, token in sorted(added.items())])
        copy.encode_special_tokens = True
        # No text contains them: nobody can guess them.
        self._mark, self._gap = (f"\ufdd0{secrets.token_hex(16)}\ufdd1" for _ in range(2))
        copy.add_tokens([AddedToken(each, normalized=False) for each in (self._mark, self._gap)])
        self._mark_id, self._gap_id = map(copy.token_to_id, (self._mark, self._gap))
        self._backend = copy
        # Ids that another order of adding would have moved.
        self._moved = {
            moved: token_id
            for token_id, token in added.items()
            if (moved := copy.token_to_id(token.content)) != token_id
        }

    def ids(self, text: str, rightful: list[_Found], broken: re.Pattern[str] | None) -> list[int]:
        """With the mark in place of the tokens of ``rightful``, and no token across the first
        character of what matches ``broken``."""
        pieces, last = [], 0
        for found in rightful:
            pieces.append(text[last : found.start])
            last = found.end
        pieces.append(text[last:])
        if broken is not None:
            pieces = [
                broken.sub(lambda match: match[0][:1] + self._gap + match[0][1:], piece)
                for piece in pieces
            ]
        (encoding,) = guarded(
            self._backend.encode_batch_fast, [self._mark.join(pieces)], add_special_tokens=False
        )
        return [self._moved.get(each, each) for each in encoding.ids if each != self._gap_id]

    def filled(self, ids: list[int], rightful: list[_Found]) -> list[int]:
        tokens = iter(rightful)
        return [next(tokens).token_id if each == self._mark_id else each for each in ids]


class _Author:
    """The author of each character of a rendered chat, as `octavo.loader.base.Rendered` has it.

    Where it is not known, a token is not the template's if what was given has its letters and
    digits in a row, whatever stands between them: filters may have taken that out, markup as well.
    """

    def __init__(self, origin: bytes, given: str) -> None:
        self.origin = origin
        self._given = given
        self._said: dict[str, bool] = {}

    def is_template(self, token: str, at: int) -> bool:
        """Whether the template wrote the token that stands there."""
        origin = self.origin[at : at + len(token)]
        if CONTENT in origin:
            return False
        if UNKNOWN not in origin:
            return True
        if token not in self._said:  # it may stand there often, and much may be given
            self._said[token] = any(_letters(token) in each for each in self._letters)
        return not self._said[token]

    @cached_property
    def _letters(self) -> list[str]:
        return [
            _letters(text)
            for text in (
                self._given,
                unescape(self._given),
                unescape(re.sub(r"<[^<>]*>", "", self._given)),
            )
        ]


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).casefold()))


def _hidden(text: str) -> str:
    text = re.sub(r"\w", _LETTER, text)
    return re.sub(rf"[^{_LETTER}\s]|[\x1c-\x1f]", _OTHER, text)
