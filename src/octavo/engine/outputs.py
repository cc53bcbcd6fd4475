"""What the engine delivers, step by step, and what it keeps of a sequence to make it."""

from __future__ import annotations

from bisect import bisect_right
from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from typing import NamedTuple

from octavo.loader.base import Tokenizer
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import SamplerState
from octavo.sampling.sampler import TokenLogprobs as TokenLogprobs
from octavo.scheduler.request import FinishReason, RequestRecord


class Delta(NamedTuple):
    """New output of one sequence of a request. Joined deltas equal the whole output.

    ``text`` never ends inside a character or inside what may still become a stop string.
    ``finish_reason`` is None until the sequence's last delta. ``record`` is set on the request's
    very last delta only, and the record is then complete. ``prompt_logprobs`` (None for the first
    token) comes with the request's first delta when asked for. ``at`` is when its last token was
    drawn, in clock seconds.
    """

    request_id: str
    choice: int  # which of the n sequences
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one a token id, when asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    record: RequestRecord | None = None
    at: float = 0.0


class SequenceOutput:
    """What the engine keeps of a sequence (`Sequence.output`): its sampler's state, what has been
    delivered, and the text that is not certain yet.

    Joined, the text is what decoding prompt and output adds to the prompt's text: a leading space
    stays. A character split over tokens waits for its last byte; bytes that cannot become a
    character are U+FFFD as soon as that is certain. Text that may still become a stop string is
    held back. Work per token does not grow with the output.

    Of several stop strings, the one completed first ends the output (at the same character: the
    longest). One completed before min_tokens does not. ``stop_token_ids`` are all ids that end the
    output (`SamplingParams.ending_ids`); the text of such a token is part of the output only with
    include_stop_str_in_output. Without a tokenizer (in simulations) there is no text, and only stop
    tokens end the output.
    """

    # Thousands may wait: each is one object, of which the garbage collector finds nothing more.
    __slots__ = (
        "_first",
        "_held",
        "_longest",
        "_num_pushed",
        "_params",
        "_partial",
        "_shows_special",
        "_stop_token_ids",
        "_stops",
        "_tokenizer",
        "in_doubt",
        "num_tokens",
        "prompt_logprobs",
        "sampler",
    )

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        stop_token_ids: Collection[int],
        sampler: SamplerState,
        begun: bytes = b"",
    ) -> None:
        """``begun``: the first bytes of a character, with which the prompt ends and which the
        output completes.
        """
        self.sampler = sampler
        self.num_tokens = 0  # delivered
        self.in_doubt = False  # tokens were pushed that may not have been delivered
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # until the first delta
        self._tokenizer = tokenizer
        self._params = params
        self._shows_special = not params.skip_special_tokens
        self._partial = begun  # of a character whose last byte has not come
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = tuple(sorted(params.stop))
        self._first = frozenset(stop[0] for stop in params.stop)
        self._longest = max(map(len, params.stop), default=0)
        self._num_pushed = 0
        self._held = ""  # the longest end of the text that a stop string begins with

    def push(
        self, token_ids: Sequence[int]
    ) -> tuple[str, int, FinishReason | None, str | int | None]:
        """Take the sequence's next tokens. Return the text that has become certain, how many of the
        tokens belong to the output (the one that ends it included), whether they end it, and the
        stop string or stop token id that does (None: the model's EOS). Push nothing after the end.
        """
        released = ""
        for count, token_id in enumerate(token_ids, 1):
            self._num_pushed += 1
            if token_id in self._stop_token_ids:
                if self._params.include_stop_str_in_output:
                    self._held += self._decode(token_id)
                own = token_id if token_id in self._params.stop_token_ids else None
                return released + self.finish(), count, FinishReason.STOP, own
            if self._tokenizer is None:
                continue
            text = self._decode(token_id)
            if not self._stops:
                released += text
                continue
            certain, stop = self._match(text)
            released += certain
            if stop is not None:
                return released, count, FinishReason.STOP, stop
        return released, len(token_ids), None, None

    def finish(self) -> str:
        """Return what was held back, when the output ends for another reason than a stop string."""
        text = self._held + utf_8_decode(self._partial, "replace", True)[0]
        self._held, self._partial = "", b""
        return text

    def _decode(self, token_id: int) -> str:
        """Return the characters that the token completes."""
        if self._tokenizer is None:
            return ""
        if self._shows_special and self._tokenizer.is_special(token_id):
            data = self._partial + self._tokenizer.token_text(token_id).encode()
        else:
            data = self._partial + self._tokenizer.token_bytes(token_id)
        text, decoded = utf_8_decode(data, "replace", False)
        self._partial = data[decoded:]
        return text

    def _match(self, text: str) -> tuple[str, str | None]:
        """Return the text now certain, and the stop string that ends the output there, if any."""
        if not self._held and self._first.isdisjoint(text):
            return text, None
        seen, text = len(self._held), self._held + text
        if self._num_pushed >= self._params.min_tokens:
            # Only ends in what is new are tried: what is held may be as long as a stop string.
            for end in range(seen + 1, len(text) + 1):
                if text.endswith(self._stops, 0, end):
                    found = [stop for stop in self._stops if text.endswith(stop, 0, end)]
                    stop = max(found, key=len)
                    included = self._params.include_stop_str_in_output
                    return text[: end if included else end - len(stop)], stop
        certain = max(0, len(text) - self._longest + 1)
        while certain < len(text) and not self._may_become_stop(text[certain:]):
            certain += 1
        self._held = text[certain:]
        return text[:certain], None

    def _may_become_stop(self, text: str) -> bool:
        """Return whether a stop string is longer than ``text`` and begins with it."""
        at = bisect_right(self._stops, text)  # they are sorted
        return at < len(self._stops) and self._stops[at].startswith(text)
