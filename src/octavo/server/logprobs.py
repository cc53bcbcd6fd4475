"""Tokens and their log probabilities as answers show them."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from octavo.engine.outputs import TokenLogprobs
from octavo.server.model import ServedModel
from octavo.server.protocol import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

_CHARACTER_BYTES = 8  # tokens that are looked at for a character that is not complete
_CONTINUATION = frozenset([b"", *(bytes([byte]) for byte in range(0x80, 0xC0))])  # in UTF-8


class TokenDisplay:
    """Tokens as one request wants them shown in its logprobs."""

    def __init__(self, model: ServedModel, *, as_ids: bool, specials_in_text: bool) -> None:
        self._model = model
        self._as_ids = as_ids
        self._specials_in_text = specials_in_text

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._model.token_text(token_id)

    def key(self, token_id: int) -> str:
        """Return a token's name in completions' logprobs."""
        return f"token_id:{token_id}" if self._as_ids else self._model.token_key(token_id)

    def keys(self, entry: TokenLogprobs) -> dict[int, str]:
        """Return the name of a position's own token and of each alternative, by token id.

        Where several have the same text, the position's own token or else the likeliest has it, and
        the others have their ids.
        """
        names: dict[int, str] = {}
        taken: set[str] = set()
        for token_id in (entry.token_id, *(token_id for token_id, _ in entry.top)):
            name = self.key(token_id)
            if name in taken and token_id not in names:
                name = f"token_id:{token_id}"
            names.setdefault(token_id, name)
            taken.add(name)
        return names

    def begun(self, token_ids: Sequence[int]) -> bytes:
        """Return the first bytes of the character that the tokens end inside, if they do."""
        data = b"".join(map(self.in_text, token_ids[-_CHARACTER_BYTES:]))
        return data[utf_8_decode(data, "replace", False)[1] :]

    def in_text(self, token_id: int, *, spelled: bool = False) -> bytes:
        """Return what the token adds to the text; ``spelled``: to one that spells special tokens
        out.
        """
        stands_for = self._model.token_bytes(token_id)
        if not stands_for and (spelled or self._specials_in_text):
            return self._model.token_text(token_id).encode()
        return stands_for

    def prompt_logprobs(self, entries: list[TokenLogprobs | None]) -> PromptLogprobs:
        """Return the entries keyed by token id, the prompt's own token first, as vLLM does."""
        return [None if entry is None else self._prompt_logprob(entry) for entry in entries]

    def _prompt_logprob(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        shown: dict[str, PromptLogprob] = {}
        own = (entry.token_id, entry.logprob, entry.rank)
        top = ((*pair, rank) for rank, pair in enumerate(entry.top, 1))
        for token_id, logprob, rank in (own, *top):
            name = str(token_id)
            if name not in shown:
                shown[name] = PromptLogprob(finite(logprob), rank, self.text(token_id))
        return shown

    def chat_logprobs(self, entries: list[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_logprob(entry) for entry in entries])

    def _chat_logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        names = self.keys(entry)

        def shown(token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
            """Return the token's text, its logprob and its bytes, which a control token lacks."""
            # The text even of a part of a character, for its bytes stand beside it.
            by_id = names[token_id].startswith("token_id:")
            text = names[token_id] if by_id else self.text(token_id)
            return text, finite(logprob), list(self._model.token_bytes(token_id)) or None

        top = [TopLogprob(*shown(token_id, logprob)) for token_id, logprob in entry.top]
        return ChatLogprob(*shown(entry.token_id, entry.logprob), top)


class CompletionLogprobsWriter:
    """One choice's logprobs, token by token: it knows how far the text has come.

    A token that starts inside a character has the offset of that character.
    """

    def __init__(
        self,
        display: TokenDisplay,
        first_offset: int = 0,
        begun: bytes = b"",
        *,
        spelled: bool = False,
    ) -> None:
        """``begun``: the first bytes of the character at ``first_offset``."""
        self._display = display
        self._offset = first_offset  # whole characters so far
        self._begun = begun
        self._spelled = spelled

    @classmethod
    def of_text(
        cls, display: TokenDisplay, text: str, token_ids: Sequence[int]
    ) -> CompletionLogprobsWriter:
        """Return a writer for the tokens of a text as a client gave it: special tokens in it are
        spelled out, and what the tokenizer put before it stands at its start.
        """
        joined = b"".join(display.in_text(token, spelled=True) for token in token_ids)
        length = len(joined.decode(errors="replace"))
        return cls(display, min(0, len(text) - length), spelled=True)

    def write(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        into: CompletionLogprobs,
    ) -> None:
        """Append the tokens to ``into``. An entry is None for the first token of a prompt, which
        nothing predicts.
        """
        display = self._display
        for token_id, entry in zip(token_ids, entries, strict=True):
            into.text_offset.append(max(0, self._advance(token_id)))
            into.tokens.append(display.key(token_id))
            if entry is None:
                into.token_logprobs.append(None)
                into.top_logprobs.append(None)
            else:
                into.token_logprobs.append(finite(entry.logprob))
                names = display.keys(entry)
                top = {names[token]: finite(logprob) for token, logprob in entry.top}
                top.setdefault(names[token_id], finite(entry.logprob))
                into.top_logprobs.append(top)

    def _advance(self, token_id: int) -> int:
        """Move past a token. Returns the offset at which it begins."""
        stands_for = self._display.in_text(token_id, spelled=self._spelled)
        # A token that cannot continue the character that has begun leaves a U+FFFD behind.
        broken = bool(self._begun) and stands_for[:1] not in _CONTINUATION
        began = self._offset + broken
        data = self._begun + stands_for
        text, decoded = utf_8_decode(data, "replace", False)
        self._offset += len(text)
        self._begun = data[decoded:]
        return began


def finite(logprob: float) -> float:
    """Return the logprob as JSON can hold it: OpenAI and vLLM write -9999 for the impossible."""
    return logprob if logprob > -9999.0 else -9999.0
