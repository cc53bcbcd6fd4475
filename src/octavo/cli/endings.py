"""Why an answer ended, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.outputs import Delta
    from octavo.sampling.params import SamplingParams


def why_ended(
    last: Delta, tokens: int, params: SamplingParams, max_model_len: int, advice: str
) -> str | None:
    """None where the model itself came to an end. ``tokens`` is the answer's length, ``advice``
    what to do about a full context.
    """
    from octavo.scheduler.request import FinishReason

    if last.finish_reason is FinishReason.LENGTH:
        if params.max_tokens is not None and tokens >= params.max_tokens:
            return f"cut off by --max-tokens {params.max_tokens}"
        return f"cut off: the context of {max_model_len:,} tokens is full; {advice}"
    if last.finish_reason is FinishReason.STOP and last.stop_reason is not None:
        what = "token id" if isinstance(last.stop_reason, int) else "stop text"
        return f"ended by the {what} {last.stop_reason!r}"
    return None
