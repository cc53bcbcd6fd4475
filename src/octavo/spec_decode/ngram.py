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


class NgramDrafter:
    """Looks up the latest place of the last ``highest`` tokens, or of fewer down to ``lowest``."""

    def __init__(self, lowest: int = 2, highest: int = 4) -> None:
        self._orders = range(highest, lowest - 1, -1)
        self._texts: dict[int, list[int]] = {}
        # The latest place behind an n-gram that has a token, for each text and order.
        self._places: dict[int, list[dict[tuple[int, ...], int]]] = {}

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        self._texts[sequence], self._places[sequence] = [], [{} for _ in self._orders]
        self.extend(sequence, token_ids)

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        tokens = self._texts[sequence]
        before = len(tokens)
        tokens.extend(token_ids)
        after = len(tokens)
        for order, places in zip(self._orders, self._places[sequence], strict=True):
            first = max(order, before)
            if after - first <= _FEW:
                for place in range(first, after):
                    places[tuple(tokens[place - order : place])] = place
            else:
                columns = [tokens[first - order + at : after - order + at] for at in range(order)]
                places.update(zip(zip(*columns, strict=True), range(first, after), strict=True))

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        return [
            self._draft(sequence, count) if count else NO_DRAFT
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def _draft(self, sequence: int, count: int) -> Draft:
        tokens = self._texts[sequence]
        for order, places in zip(self._orders, self._places[sequence], strict=True):
            place = places.get(tuple(tokens[-order:]))
            if place is not None:
                return Draft(continued(tokens, place, count), min(order, 15))
        return NO_DRAFT

    def end(self, sequence: int) -> None:
        del self._texts[sequence], self._places[sequence]
