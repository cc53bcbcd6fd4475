"""From a request's fields to `SamplingParams`. The engine validates them against the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.sampling.params import InvalidParameter, SamplingParams, parameters
from octavo.server.protocol import GenerateRequest

# Every parameter of the table but those that each endpoint reads in its own way. A null is the
# model's default, or else the table's.
_SAME = tuple(parameters().keys() - {"max_tokens", "logprobs", "stop", "logit_bias"})
_TOKEN_LISTS = ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids")
# Entries of such lists, over all choices: each sequence keeps its own, and a short body can ask for
# a whole vocabulary in a thousand choices.
MAX_LISTED = 1 << 20


def sampling_params(
    request: GenerateRequest,
    defaults: Mapping[str, Any],
    *,
    choices: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """``defaults``: the model's own, of what the request leaves out. ``choices``: how many
    sequences will have these parameters. Raises `InvalidParameter`.
    """
    for name in _TOKEN_LISTS:
        count = len(getattr(request, name) or ())
        if count * choices > MAX_LISTED:
            raise InvalidParameter(
                name,
                f"{name} has {count} tokens for each of {choices} choices: {count * choices}, "
                f"more than {MAX_LISTED}",
            )
    fields: dict[str, Any] = {
        name: value
        for name in _SAME
        if (value := getattr(request, name)) is not None
        or (value := defaults.get(name)) is not None
    }
    if request.stop is not None:
        fields["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are texts: "42" is token 42."""
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidParameter("logit_bias", f"logit_bias: {key!r} is not a token id")
        if int(key) in by_id:
            raise InvalidParameter("logit_bias", f"logit_bias: token {int(key)} is given twice")
        by_id[int(key)] = value
    return by_id
