"""How a request wants its tokens chosen, and when it wants to stop."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

MAX_N = 128
MAX_TEMPERATURE = 100.0  # far above it every distribution is flat to float32
MIN_TEMPERATURE = 1e-5  # below it the draw is the maximum
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_LOGIT_BIASES = 4096
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 4096


class InvalidParameter(ValueError):
    """A request field that cannot be honoured; ``param`` is its name in the API."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names, defaults and order of application follow vLLM.

    logits → allowed/banned tokens → logit_bias → min_tokens (no stop token before it)
    → repetition, frequency, presence penalties → temperature → min_p → top_k → top_p → draw.

    top_k and top_p keep the lower token id among equals. top_p is a share of what min_p and top_k
    left. Logprobs are of the model's own distribution, before any of these.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    temperature: float = 1.0  # 0 (or below MIN_TEMPERATURE) = greedy
    top_k: int = 0  # 0 or -1 = all, as is any number from the vocabulary's size on
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # generated tokens only
    frequency_penalty: float = 0.0  # generated tokens only
    repetition_penalty: float = 1.0  # prompt and generated tokens
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: the engine draws one at admission
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives besides the chosen token
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def validated(self, vocab_size: int, max_logprobs: int = 20) -> SamplingParams:
        """These parameters checked against a model, with lists as tuples and "all" as top_k 0.

        Raises InvalidParameter naming the first field that cannot be honoured, its value and the
        range allowed. Nothing is clamped or ignored.
        """
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}",
            )
        _number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _integer("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, max_logprobs)
        banned = _token_ids("banned_token_ids", self.banned_token_ids, vocab_size, vocab_size)
        return replace(
            self,
            top_k=self.top_k if 0 < self.top_k < vocab_size else 0,
            logit_bias=_validated_bias(self.logit_bias, vocab_size),
            allowed_token_ids=_validated_allowed(self.allowed_token_ids, banned, vocab_size),
            banned_token_ids=banned,
            stop=_validated_stop(self.stop),
            stop_token_ids=_token_ids(
                "stop_token_ids", self.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS
            ),
        )

    def ending_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """All token ids that end the output: the request's own, and the model's unless ignored."""
        own = frozenset(self.stop_token_ids)
        if self.ignore_eos:
            return own
        models = frozenset(eos_token_ids)  # itself, if it is one: requests share it
        return own | models if own else models


_INT32_MAX = 2**31 - 1


def _refusal(param: str, value: object, allowed: str, *, inside: bool = False) -> InvalidParameter:
    try:
        shown = reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than some thousands of digits
        shown = "a number too long to write"
    if inside:
        return InvalidParameter(param, f"{param} contains {shown}; it may contain {allowed}")
    return InvalidParameter(param, f"{param} is {shown}; it must be {allowed}")


def _integer(param: str, value: object, low: int, high: int | None) -> None:
    allowed = f"an integer from {low}" + ("" if high is None else f" to {high}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refusal(param, value, allowed)
    if value < low or (high is not None and value > high):
        raise _refusal(param, value, allowed)


def _number(param: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    allowed = f"above {low:g}, up to {high:g}" if open_low else f"from {low:g} to {high:g}"
    # Not a number fails every comparison, and infinity one of these.
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not low <= value <= high
        or (open_low and value == low)
    ):
        raise _refusal(param, value, f"a number {allowed}")


def _items(param: str, value: object, limit: int) -> list[object]:
    if not isinstance(value, list | tuple | set | frozenset) or len(value) > limit:
        raise _refusal(param, value, f"a list of at most {limit}")
    return list(value)


def _token_id(param: str, value: object, vocab_size: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise _refusal(param, value, f"token ids from 0 to {vocab_size - 1}", inside=True)
    return value


def _token_ids(param: str, value: object, vocab_size: int, limit: int) -> tuple[int, ...]:
    return tuple(_token_id(param, item, vocab_size) for item in _items(param, value, limit))


def _validated_stop(stop: object) -> tuple[str, ...]:
    strings = []
    for string in [stop] if isinstance(stop, str) else _items("stop", stop, MAX_STOP_STRINGS):
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_STRING_LENGTH:
            allowed = f"strings of 1 to {MAX_STOP_STRING_LENGTH} characters"
            raise _refusal("stop", string, allowed, inside=True)
        strings.append(string)
    return tuple(strings)


def _validated_bias(bias: object, vocab_size: int) -> dict[int, float]:
    if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIASES:
        raise _refusal("logit_bias", bias, f"a map of at most {MAX_LOGIT_BIASES} token ids")
    for token_id, value in bias.items():
        _token_id("logit_bias", token_id, vocab_size)
        _number("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    return {token_id: float(value) for token_id, value in bias.items()}


def _validated_allowed(
    allowed: object, banned: tuple[int, ...], vocab_size: int
) -> tuple[int, ...] | None:
    if allowed is None:
        if len(set(banned)) == vocab_size:
            raise InvalidParameter(
                "banned_token_ids", f"banned_token_ids leaves none of {vocab_size} tokens"
            )
        return None
    ids = _token_ids("allowed_token_ids", allowed, vocab_size, vocab_size)
    if not set(ids) - set(banned):
        raise InvalidParameter(
            "allowed_token_ids",
            f"allowed_token_ids has {len(ids)} ids, and banned_token_ids leaves none of them",
        )
    return ids
