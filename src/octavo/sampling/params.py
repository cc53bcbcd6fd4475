"""The sampling parameters: one table, from which everything else that lists them is made.

A field of `SamplingParams` carries its `Parameter`: the values it may have, its type in request
bodies, its line of help, and whether the native sampler has an option of that name. Validation,
HTTP fields (server/protocol.py), command-line options (cli/options.py), llama.cpp's flags
(cli/elsewhere.py), the requests that a certificate tries (tools/verify/trials.py) and the native
sampler's options (sampling/native.py) read the table, so a new parameter is a field here, its row
in kernels/sampler_state.h, whatever applies it (kernels/sampler.cpp), and a line in
docs/serving.md.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import inf
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

MAX_N = 128
MAX_TEMPERATURE = 100.0  # far above it every distribution is flat to float32
MIN_TEMPERATURE = 1e-5  # below it the draw is the maximum
MAX_TOP_N_SIGMA = 1000.0  # of 500,000 logits none is so far below the greatest: √(2 · 500,000)
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_LOGIT_BIASES = 4096
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 4096
_INT32_MAX = 2**31 - 1


class InvalidParameter(ValueError):
    """A request field that cannot be honoured; ``param`` is its name in the API."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ModelLimits(NamedTuple):
    """What the values of some parameters depend on."""

    vocab_size: int
    max_logprobs: int


class Kind(NamedTuple):
    """A set of allowed values. ``check(name, value, limits)`` returns the value as the engine keeps
    it, or raises `InvalidParameter` with the name, the value and the range allowed.
    """

    http_type: Any  # in request bodies; msgspec converts to it
    check: Callable[[str, object, ModelLimits], Any]


def _refusal(param: str, value: object, allowed: str, *, inside: bool = False) -> InvalidParameter:
    try:
        shown = reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than some thousands of digits
        shown = "a number too long to write"
    if inside:
        return InvalidParameter(param, f"{param} contains {shown}; it may contain {allowed}")
    return InvalidParameter(param, f"{param} is {shown}; it must be {allowed}")


def _kind(http_type: Any, allowed: str, allows: Callable[[Any], bool]) -> Kind:
    def check(name: str, value: object, limits: ModelLimits) -> Any:
        if not allows(value):
            raise _refusal(name, value, allowed)
        return value

    return Kind(http_type, check)


def _integer(low: int, high: int | None = None) -> Kind:
    allowed = f"an integer from {low}" + ("" if high is None else f" to {high}")
    most = inf if high is None else high

    def allows(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= most

    return _kind(int, allowed, allows)


def _number(low: float, high: float, *, open_low: bool = False, other: float | None = None) -> Kind:
    """``other``: a value outside the range that is allowed too."""
    allowed = f"above {low:g}, up to {high:g}" if open_low else f"from {low:g} to {high:g}"
    if other is not None:
        allowed += f", or {other:g}"

    def allows(value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        # Not a number fails every comparison, and infinity one of these.
        inside = low <= value <= high and not (open_low and value == low)
        return inside or value == other

    return _kind(float, f"a number {allowed}", allows)


def _optional(kind: Kind) -> Kind:
    def check(name: str, value: object, limits: ModelLimits) -> Any:
        return None if value is None else kind.check(name, value, limits)

    return Kind(kind.http_type, check)


def _check_logprobs(name: str, value: object, limits: ModelLimits) -> Any:
    return _integer(0, limits.max_logprobs).check(name, value, limits)


def _items(param: str, value: object, limit: int) -> list[object]:
    if not isinstance(value, list | tuple | set | frozenset) or len(value) > limit:
        raise _refusal(param, value, f"a list of at most {limit}")
    return list(value)


def _token_id(param: str, value: object, vocab_size: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise _refusal(param, value, f"token ids from 0 to {vocab_size - 1}", inside=True)
    return value


def _token_ids(limit: int | None = None) -> Kind:
    """``limit`` None: as many as the vocabulary has."""

    def check(name: str, value: object, limits: ModelLimits) -> tuple[int, ...]:
        items = _items(name, value, limits.vocab_size if limit is None else limit)
        return tuple(_token_id(name, item, limits.vocab_size) for item in items)

    return Kind(list[int], check)


def _check_stop(name: str, value: object, limits: ModelLimits) -> tuple[str, ...]:
    strings = []
    for string in [value] if isinstance(value, str) else _items(name, value, MAX_STOP_STRINGS):
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_STRING_LENGTH:
            allowed = f"strings of 1 to {MAX_STOP_STRING_LENGTH} characters"
            raise _refusal(name, string, allowed, inside=True)
        strings.append(string)
    return tuple(strings)


def _check_bias(name: str, value: object, limits: ModelLimits) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise _refusal(name, value, f"a map of at most {MAX_LOGIT_BIASES} token ids")
    bias = _number(-MAX_BIAS, MAX_BIAS)
    for token_id, each in value.items():
        _token_id(name, token_id, limits.vocab_size)
        bias.check(name, each, limits)
    return {token_id: float(each) for token_id, each in value.items()}


_FLAG = _kind(bool, "true or false", lambda value: isinstance(value, bool))
_LOGPROBS = _optional(Kind(int, _check_logprobs))
_STOP = Kind(str | list[str], _check_stop)
_BIAS = Kind(Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIASES)], _check_bias)


class Parameter(NamedTuple):
    """A row of the table."""

    kind: Kind
    help: str  # for --help
    native: bool  # the native sampler has an option of this name
    llama_cpp: str  # its flags in llama.cpp, where they have other names
    tried: Any  # a value that a certificate tries, where no trial there says its own; None: none


def _parameter(
    default: Any,
    kind: Kind,
    help: str,
    *,
    native: bool = False,
    llama_cpp: str = "",
    tried: Any = None,
) -> Any:
    row = Parameter(kind, help, native, llama_cpp, tried)
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"row": row})
    return field(default=default, metadata={"row": row})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names, defaults and order of application follow vLLM.

    logits → allowed/banned tokens → logit_bias → min_tokens (no stop token before it)
    → repetition, frequency, presence penalties → top_n_sigma → temperature → min_p → top_k → top_p
    → draw.

    top_n_sigma (llama.cpp's; Tang et al., "Top-nσ: Not All Logits Are You Need", 2024) keeps the
    logits that are at least max - n · σ. σ is the standard deviation (of a population: divided by
    the count) of all logits after masks, bias and penalties, but for those that are -infinity:
    banned and not allowed tokens count nothing, and a bias, which is finite, counts. As max and σ
    scale alike, the tokens kept are the same at every temperature.

    top_k and top_p keep the lower token id among equals. top_p is a share of what top_n_sigma,
    min_p and top_k left. Logprobs are of the model's own distribution, before any of these.
    """

    # fmt: off
    n: int = _parameter(1, _integer(1, MAX_N), "Answers to each prompt.")
    max_tokens: int | None = _parameter(  # None: until the context is full
        16, _optional(_integer(1, _INT32_MAX)), "Most new tokens per answer.",
        llama_cpp="-n --predict --n-predict")
    min_tokens: int = _parameter(
        0, _integer(0, _INT32_MAX), "No end before this many tokens.", native=True)
    temperature: float = _parameter(  # 0 (or below MIN_TEMPERATURE) = greedy
        1.0, _number(0, MAX_TEMPERATURE), "0 is greedy.", native=True, llama_cpp="--temp")
    top_k: int = _parameter(  # 0 or -1 = all, as is any number from the vocabulary's size on
        0, _integer(-1), "Draw from the k most likely; 0: all.", native=True)
    top_p: float = _parameter(
        1.0, _number(0, 1, open_low=True), "Draw from the likeliest that add up to this.",
        native=True)
    min_p: float = _parameter(
        0.0, _number(0, 1), "Drop what is less likely than this times the likeliest.",
        native=True)
    top_n_sigma: float = _parameter(  # 0 or -1 = all
        0.0, _number(0, MAX_TOP_N_SIGMA, other=-1),
        "Drop logits more than n standard deviations below the greatest; 0: none.", native=True,
        llama_cpp="--top-nsigma", tried=1.5)
    presence_penalty: float = _parameter(  # generated tokens only
        0.0, _number(-2, 2), "Against tokens already in the answer, -2 to 2.", native=True)
    frequency_penalty: float = _parameter(  # generated tokens only
        0.0, _number(-2, 2), "The same for each time they occurred, -2 to 2.", native=True)
    repetition_penalty: float = _parameter(  # prompt and generated tokens
        1.0, _number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "Above 1: against what prompt and answer have.", native=True,
        llama_cpp="--repeat-penalty")
    seed: int | None = _parameter(  # None: the engine draws one at admission
        None, _optional(_integer(-(2**63), 2**63 - 1)), "Same seed, same tokens.", native=True,
        llama_cpp="-s")
    include_stop_str_in_output: bool = _parameter(
        False, _FLAG, "Keep the stop text in the answer.")
    ignore_eos: bool = _parameter(False, _FLAG, "Go on past the model's own end.")
    skip_special_tokens: bool = _parameter(True, _FLAG, "Leave special tokens out of the text.")
    logprobs: int | None = _parameter(  # how many alternatives besides the chosen token
        None, _LOGPROBS, "Log probabilities of each token and so many alternatives.", native=True)
    prompt_logprobs: int | None = _parameter(
        None, _LOGPROBS, "The same of each token of the prompt.")
    logit_bias: dict[int, float] = _parameter(  # noqa: RUF009
        {}, _BIAS, "Add to a token's logit, as 314=-100 (repeatable).", native=True)
    banned_token_ids: tuple[int, ...] = _parameter(
        (), _token_ids(), "Never draw these token ids.", native=True)
    allowed_token_ids: tuple[int, ...] | None = _parameter(
        None, _optional(_token_ids()), "Draw only these token ids.", native=True)
    stop: tuple[str, ...] = _parameter((), _STOP, "End before this text (repeatable).")
    stop_token_ids: tuple[int, ...] = _parameter(
        (), _token_ids(MAX_STOP_TOKEN_IDS), "End at these token ids: 1,2,3.", native=True)
    # fmt: on

    def validated(self, vocab_size: int, max_logprobs: int = 20) -> SamplingParams:
        """Return these parameters checked against a model, with lists as tuples and "all" as
        top_k 0 and top_n_sigma 0.

        Raises InvalidParameter naming the first field that cannot be honoured, its value and the
        range allowed. Nothing is clamped or ignored.
        """
        limits = ModelLimits(vocab_size, max_logprobs)
        checked = {
            name: row.kind.check(name, getattr(self, name), limits)
            for name, row in parameters().items()
        }
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}",
            )
        if not 0 < self.top_k < vocab_size:
            checked["top_k"] = 0
        if self.top_n_sigma < 0:
            checked["top_n_sigma"] = 0.0
        _check_some_left(checked["allowed_token_ids"], checked["banned_token_ids"], vocab_size)
        return replace(self, **checked)

    def ending_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """All token ids that end the output: the request's own, and the model's unless ignored."""
        own = frozenset(self.stop_token_ids)
        if self.ignore_eos:
            return own
        models = frozenset(eos_token_ids)  # itself, if it is one: requests share it
        return own | models if own else models


@cache
def parameters() -> Mapping[str, Parameter]:
    """The table, by name."""
    return {each.name: each.metadata["row"] for each in fields(SamplingParams)}


def _check_some_left(
    allowed: tuple[int, ...] | None, banned: tuple[int, ...], vocab_size: int
) -> None:
    if allowed is None:
        if len(set(banned)) == vocab_size:
            raise InvalidParameter(
                "banned_token_ids", f"banned_token_ids leaves none of {vocab_size} tokens"
            )
    elif not set(allowed) - set(banned):
        raise InvalidParameter(
            "allowed_token_ids",
            f"allowed_token_ids has {len(allowed)} ids, and banned_token_ids leaves none of them",
        )
