"""The response bodies. What OpenAI's API does not have is left out unless it was asked for."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from octavo.engine.outputs import TokenLogprobs
from octavo.scheduler.request import RequestRecord
from octavo.server.model import ServedModel

FinishReason = Literal["stop", "length"]

_CHARACTER_BYTES = 8  # tokens that are looked at for a character that is not complete
_CONTINUATION = frozenset([b"", *(bytes([byte]) for byte in range(0x80, 0xC0))])  # in UTF-8


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of speculation: draft tokens that became output, and those checked in vain (not charged)."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @staticmethod
    def of(records: list[RequestRecord], *, predictions: bool | None = False) -> Usage:
        prompt = sum(record.prompt_tokens for record in records)
        completion = sum(record.completion_tokens for record in records)
        cached = sum(record.cached_tokens for record in records)
        usage = Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
        if predictions:
            drafted = sum(record.draft_tokens for record in records)
            accepted = sum(record.accepted_tokens for record in records)
            usage.completion_tokens_details = CompletionTokensDetails(accepted, drafted - accepted)
        return usage


class CompletionLogprobs(Struct):
    text_offset: list[int]  # characters from the start of this choice's text
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str


class Version(Struct):
    version: str


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(Struct):
    error: ErrorBody


json = msgspec.json.Encoder()


class TokenShower:
    """Tokens as one request wants them shown in its logprobs."""

    def __init__(self, model: ServedModel, *, as_ids: bool, specials_in_text: bool) -> None:
        self._shown = model.shown
        self._as_ids = as_ids
        self._specials_in_text = specials_in_text

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._shown.text(token_id)

    def keys(self, entry: TokenLogprobs) -> dict[int, str]:
        """The name of a position's own token and of each alternative, by token id: where several
        stand for the same text, the own one or else the likeliest has it, and others their ids.
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

    def key(self, token_id: int) -> str:
        """A token's name in completions' logprobs."""
        return f"token_id:{token_id}" if self._as_ids else self._shown.key(token_id)

    def begun(self, token_ids: Sequence[int]) -> bytes:
        """The first bytes of a character that the tokens end in the middle of."""
        data = b"".join(map(self.in_text, token_ids[-_CHARACTER_BYTES:]))
        return data[utf_8_decode(data, "replace", False)[1] :]

    def in_text(self, token_id: int, *, spelled: bool = False) -> bytes:
        """What the token adds to the text; ``spelled``: one that spells special tokens out."""
        stands_for = self._shown.bytes(token_id)
        if not stands_for and (spelled or self._specials_in_text):
            return self._shown.text(token_id).encode()
        return stands_for

    def prompt_logprobs(self, entries: list[TokenLogprobs | None]) -> PromptLogprobs:
        """Keyed by token id, the prompt's own token first, as vLLM gives them."""
        return [None if entry is None else self._prompt_logprob(entry) for entry in entries]

    def _prompt_logprob(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        shown = {
            str(entry.token_id): PromptLogprob(
                finite(entry.logprob), entry.rank, self.text(entry.token_id)
            )
        }
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            shown.setdefault(
                str(token_id), PromptLogprob(finite(logprob), rank, self.text(token_id))
            )
        return shown

    def chat_logprobs(self, entries: list[TokenLogprobs]) -> list[ChatLogprob]:
        return [self._chat_logprob(entry) for entry in entries]

    def _chat_logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        names = self.keys(entry)

        def shown(token_id: int) -> str:
            """Its text, for the bytes of a part of a character stand beside it."""
            by_id = names[token_id].startswith("token_id:")
            return names[token_id] if by_id else self.text(token_id)

        return ChatLogprob(
            shown(entry.token_id),
            finite(entry.logprob),
            self._bytes_or_none(entry.token_id),
            [
                TopLogprob(shown(token), finite(logprob), self._bytes_or_none(token))
                for token, logprob in entry.top
            ],
        )

    def _bytes_or_none(self, token_id: int) -> list[int] | None:
        """None for a control token, which stands for no bytes."""
        return list(self._shown.bytes(token_id)) or None


class CompletionLogprobsWriter:
    """One choice's logprobs, token by token: knows how far the text has come.

    A token that starts inside a character has the offset of that character.
    """

    def __init__(
        self,
        shower: TokenShower,
        first_offset: int = 0,
        begun: bytes = b"",
        *,
        spelled: bool = False,
    ) -> None:
        """``begun``: the first bytes of the character at ``first_offset``."""
        self._shower = shower
        self._offset = first_offset  # whole characters so far
        self._begun = begun
        self._spelled = spelled

    @classmethod
    def of_text(
        cls, shower: TokenShower, text: str, token_ids: Sequence[int]
    ) -> CompletionLogprobsWriter:
        """For the tokens of a text as a client gave it. Special tokens in it are spelled out; what
        was put before it stands at its start.
        """
        joined = b"".join(shower.in_text(token, spelled=True) for token in token_ids)
        length = len(joined.decode(errors="replace"))
        return cls(shower, min(0, len(text) - length), spelled=True)

    def take(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """An entry is None for the first token of a prompt, which nothing predicts."""
        out = CompletionLogprobs([], [], [], [])
        shower = self._shower
        for token_id, entry in zip(token_ids, entries, strict=True):
            out.text_offset.append(max(0, self._advance(token_id)))
            out.tokens.append(shower.key(token_id))
            if entry is None:
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
            else:
                out.token_logprobs.append(finite(entry.logprob))
                names = shower.keys(entry)
                top = {names[token]: finite(logprob) for token, logprob in entry.top}
                top.setdefault(names[token_id], finite(entry.logprob))
                out.top_logprobs.append(top)
        return out

    def _advance(self, token_id: int) -> int:
        """Past a token; where it began."""
        stands_for = self._shower.in_text(token_id, spelled=self._spelled)
        # What cannot go on with a character that has begun leaves a U+FFFD behind.
        broken = bool(self._begun) and stands_for[:1] not in _CONTINUATION
        began = self._offset + broken
        data = self._begun + stands_for
        text, decoded = utf_8_decode(data, "replace", False)
        self._offset += len(text)
        self._begun = data[decoded:]
        return began


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI and vLLM write the logprob of the impossible as -9999."""
    return logprob if logprob > -9999.0 else -9999.0


def extend(into: CompletionLogprobs | None, more: CompletionLogprobs) -> CompletionLogprobs:
    if into is None:
        return more
    into.text_offset += more.text_offset
    into.token_logprobs += more.token_logprobs
    into.tokens += more.tokens
    into.top_logprobs += more.top_logprobs
    return into
