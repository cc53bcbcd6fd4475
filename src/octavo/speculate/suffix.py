"""What followed the longest end of the text that occurred before, there or in earlier answers.

The longest match is found as compressors find theirs (LZ77; hash chains as in RFC 1951, section 4):
every pair of tokens knows where it occurred before, and of the latest of these places the one that
agrees longest, backwards, is taken. While the text goes on as it did there, the match only grows,
and nothing is searched. Of places that agree equally long, what followed most often counts
(Oliaro et al., "SuffixDecoding", 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from octavo.speculate.drafter import NO_DRAFT, Draft
from octavo.speculate.ngram import continued

_PLACES = 16  # looked at in a search
_LONGEST = 64  # tokens of a match that are compared
_SALTS = 64  # whose answers are remembered


class _Match:
    """A place in a text before which it reads as at the end of the sequence."""

    __slots__ = ("length", "place", "text")

    def __init__(self, text: _Text, place: int, length: int) -> None:
        self.text = text
        self.place = place
        self.length = length


class _Text:
    """Tokens, and for each place the one before it that follows the same two tokens."""

    __slots__ = ("_earlier", "_latest", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = [0]  # 0: there is none

    def extend(self, token_ids: Sequence[int]) -> None:
        """The last place is entered with the token after it."""
        tokens, latest, earlier = self.tokens, self._latest, self._earlier
        before = len(tokens)
        tokens.extend(token_ids)
        for place in range(before, len(tokens)):
            if place < 2:
                earlier.append(0)
                continue
            pair = tokens[place - 2], tokens[place - 1]
            earlier[place] = latest.get(pair, 0)
            latest[pair] = place
            earlier.append(0)

    def find(self, tokens: list[int]) -> _Match | None:
        """The longest match of the end of ``tokens``."""
        if len(tokens) < 2:
            return None
        place = self._latest.get((tokens[-2], tokens[-1]), 0)
        text, earlier = self.tokens, self._earlier
        places: list[int] = []
        best, distinguishing = 2, tokens[-2]
        for _ in range(_PLACES):
            if not place:
                break
            if best <= place and text[place - best] == distinguishing:
                length = self._agreement(tokens, place, best)
                if length > best:
                    places, best, distinguishing = [place], length, tokens[-length]
                    if length == _LONGEST:
                        break
                elif length == best:
                    places.append(place)
            place = earlier[place]
        if not places:
            return None
        if len(places) > 2:
            votes: dict[int, int] = {}
            for place in places:
                votes[self.tokens[place]] = votes.get(self.tokens[place], 0) + 1
            favourite = max(votes, key=votes.__getitem__)  # of equals, the one seen last
            place = next(place for place in places if self.tokens[place] == favourite)
            return _Match(self, place, best)
        return _Match(self, places[0], best)

    def _agreement(self, tokens: list[int], place: int, least: int) -> int:
        """How many tokens before ``place`` are those at the end of ``tokens``; 0 if fewer than
        ``least``. The last two are.
        """
        text = self.tokens
        if least > 2 and text[place - least : place] != tokens[-least:]:
            return 0
        length = least
        most = min(place, len(tokens), _LONGEST)
        while length < most and text[place - length - 1] == tokens[-length - 1]:
            length += 1
        return length


class _Answers:
    """Earlier answers, in two halves: when the younger is full, the older is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self.halves = [_Text()]

    def add(self, token_ids: Sequence[int]) -> None:
        if self._count >= self._most / 2:
            self.halves = [_Text(), self.halves[0]]
            self._count = 0
        self.halves[0].extend(token_ids)
        self._count += 1


class _Sequence:
    __slots__ = ("answers", "match", "started", "text")

    def __init__(self, token_ids: Sequence[int], answers: _Answers | None) -> None:
        self.text = _Text()
        self.text.extend(token_ids)
        self.started = len(token_ids)
        self.answers = answers
        self.match: _Match | None = None

    def extend(self, token_ids: Sequence[int]) -> None:
        self.text.extend(token_ids)
        match = self.match
        if match is not None:
            tokens = match.text.tokens
            for token in token_ids:
                if match.place >= len(tokens) or tokens[match.place] != token:
                    self.match = None
                    break
                match.place += 1
                match.length += 1

    def draft(self, count: int) -> Draft:
        match = self.match
        if match is None:
            tokens = self.text.tokens
            match = self.text.find(tokens)
            for half in self.answers.halves if self.answers else ():
                other = half.find(tokens)
                if other is not None and (match is None or other.length > match.length):
                    match = other
            self.match = match
            if match is None:
                return NO_DRAFT
        if match.text is self.text:
            return Draft(continued(match.text.tokens, match.place, count), _evidence(match.length))
        draft = match.text.tokens[match.place : match.place + count]
        return Draft(draft, _evidence(match.length))


def _evidence(length: int) -> int:
    return length if length <= 8 else min(15, 5 + length.bit_length())


class SuffixDrafter:
    """``max_cached_requests``: how many earlier answers are searched too. They serve requests of
    the same cache_salt only; how soon a token comes may then tell of another's answer.
    """

    def __init__(self, max_cached_requests: int = 0) -> None:
        self._most = max_cached_requests
        self._sequences: dict[int, _Sequence] = {}
        self._answers: OrderedDict[str | None, _Answers] = OrderedDict()

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        self._sequences[sequence] = _Sequence(token_ids, self._answers_of(cache_salt))

    def _answers_of(self, cache_salt: str | None) -> _Answers | None:
        if not self._most:
            return None
        answers = self._answers.get(cache_salt)
        if answers is None:
            answers = self._answers[cache_salt] = _Answers(self._most)
            if len(self._answers) > _SALTS:
                self._answers.popitem(last=False)
        self._answers.move_to_end(cache_salt)
        return answers

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._sequences[sequence].extend(token_ids)

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        known = self._sequences
        return [
            known[sequence].draft(count) if count else NO_DRAFT
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def end(self, sequence: int) -> None:
        ended = self._sequences.pop(sequence)
        if ended.answers is not None:
            # From the token on with which it began to decode.
            ended.answers.add(ended.text.tokens[ended.started - 1 :])
