"""Prompt lookup: drafts what followed the last few tokens where they occurred before.

Saxena, "Prompt Lookup Decoding" (2023). Text that quotes, edits or extracts repeats its source.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.spec_decode.drafter import NO_DRAFT, Draft

_FEW = 8  # tokens; more are entered at once, which is faster


def continued(text: list[int], at: int, count: int) -> list[int]:
    """Return ``count`` tokens of the text from ``at`` on. A text that ends earlier is continued as
    if it repeated itself from ``at`` on.
    """
    draft = text[at : at + count]
    while len(draft) < count:
        draft += draft[: count - len(draft)]
    return draft


class _NgramText:
    """A sequence's tokens, and for each n-gram the latest place behind it that has a token."""

    __slots__ = ("_ends", "tokens")

    def __init__(self, orders: range) -> None:
        self.tokens: list[int] = []
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (order, {}) for order in reversed(orders)
        ]

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens = self.tokens
        before = len(tokens)
        tokens.extend(token_ids)
        after = len(tokens)
        for order, ends in self._ends:
            first = max(order, before)
            if after - first <= _FEW:
                for end in range(first, after):
                    ends[tuple(tokens[end - order : end])] = end
            else:
                columns = [tokens[first - order + at : after - order + at] for at in range(order)]
                ends.update(zip(zip(*columns, strict=True), range(first, after), strict=True))

    def draft(self, count: int) -> Draft:
        for order, ends in self._ends:
            end = ends.get(tuple(self.tokens[-order:]))
            if end is not None:
                return Draft(continued(self.tokens, end, count), min(order, 15))
        return NO_DRAFT


class NgramDrafter:
    """Looks up the latest place of the last ``highest`` tokens, or of fewer down to ``lowest``."""

    def __init__(self, lowest: int = 2, highest: int = 4) -> None:
        self._orders = range(lowest, highest + 1)
        self._texts: dict[int, _NgramText] = {}

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        self._texts[sequence] = _NgramText(self._orders)
        self._texts[sequence].extend(token_ids)

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._texts[sequence].extend(token_ids)

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        texts = self._texts
        return [
            texts[sequence].draft(count) if count else NO_DRAFT
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def end(self, sequence: int) -> None:
        del self._texts[sequence]
