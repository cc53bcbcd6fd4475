"""The text of an answer, as the engine wants it told; and none, for simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.engine.detokenize import Released
from octavo.sampling.params import SamplingParams


class Text(Protocol):
    """A sequence's text as it grows, and where a stop token or string ends it."""

    def begin(self, character: bytes) -> None:
        """The text begins inside a character, with these bytes of it. Before anything is pushed."""
        ...

    def push(self, token_ids: Sequence[int]) -> Released: ...

    def finish(self) -> str:
        """What was held back, when the output ends for another reason."""
        ...


TextFactory = Callable[[SamplingParams, frozenset[int]], Text]


class NoText:
    """For simulations: no text, only stop tokens."""

    def __init__(self, params: SamplingParams, ending_ids: frozenset[int]) -> None:
        self._ending_ids = ending_ids
        self._own = frozenset(params.stop_token_ids)

    def begin(self, character: bytes) -> None:
        pass

    def push(self, token_ids: Sequence[int]) -> Released:
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self._ending_ids:
                return Released("", count, True, token_id if token_id in self._own else None)
        return Released("", len(token_ids))

    def finish(self) -> str:
        return ""
