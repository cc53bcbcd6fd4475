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

from octavo.spec_decode.drafter import NO_DRAFT, Draft
from octavo.spec_decode.ngram import continued

_PLACES = 16  # looked at in a search
_LONGEST = 64  # tokens of a match that are compared
_REMEMBERED = 1_000_000  # tokens of answers, some 160 bytes each


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

    def others(self, tokens: list[int], token: int, most: int) -> list[int]:
        """Up to ``most`` places before which it reads as at the end of ``tokens``, and where not
        ``token`` follows but others, each another one: those that agree longest, of equals the
        latest.
        """
        if len(tokens) < 2:
            return []
        place = self._latest.get((tokens[-2], tokens[-1]), 0)
        text, earlier = self.tokens, self._earlier
        lengths: dict[int, tuple[int, int]] = {}  # by the token that follows; and the place
        for _ in range(_PLACES):
            if not place:
                break
            following = text[place]
            if following != token:
                length = self._agreement(tokens, place, 2)
                if length > lengths.get(following, (0, 0))[0]:
                    lengths[following] = length, place
            place = earlier[place]
        best = sorted(lengths.values(), key=lambda entry: -entry[0])
        return [place for _, place in best[:most]]

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
    """Earlier answers of one salt, in parts: the oldest part is forgotten at once."""

    def __init__(self) -> None:
        self.parts: list[_Text] = []  # the youngest first
        self._counts: list[int] = []

    def add(self, token_ids: Sequence[int], most: int) -> None:
        """A part holds up to ``most`` answers."""
        if not self.parts or self._counts[0] >= most:
            self.parts.insert(0, _Text())
            self._counts.insert(0, 0)
        self.parts[0].extend(token_ids)
        self._counts[0] += 1

    def forget(self) -> tuple[int, int]:
        """The oldest part; how many answers and tokens it held."""
        return self._counts.pop(), len(self.parts.pop().tokens)


class _Sequence:
    __slots__ = ("match", "salt", "started", "text")

    def __init__(self, token_ids: Sequence[int], salt: str | None) -> None:
        self.text = _Text()
        self.text.extend(token_ids)
        self.started = len(token_ids)
        self.salt = salt
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

    def draft(self, count: int, answers: _Answers | None, most_alternatives: int) -> Draft:
        match = self.match
        if match is None:
            tokens = self.text.tokens
            match = self.text.find(tokens)
            for part in answers.parts if answers else ():
                other = part.find(tokens)
                if other is not None and (match is None or other.length > match.length):
                    match = other
            self.match = match
            if match is None:
                return NO_DRAFT
        tokens, text = self.text.tokens, match.text.tokens
        if match.text is self.text:
            draft = continued(tokens, match.place, count)
        else:
            draft = text[match.place : match.place + count]
        if not most_alternatives or not draft:
            return Draft(draft, _evidence(match.length))
        places = self.text.others(tokens, draft[0], most_alternatives)
        alternatives = [continued(tokens, place, count) for place in places]
        return Draft(draft, _evidence(match.length), alternatives)


def _evidence(length: int) -> int:
    return length if length <= 8 else min(15, 5 + length.bit_length())


class SuffixDrafter:
    """``max_cached_requests``: how many earlier answers are searched too, at most a million tokens
    of them. They serve requests of the same cache_salt only; how soon a token comes may then tell
    of another's answer. The salt that went longest without an answer forgets first.

    ``alternatives``: how many other guesses stand beside each draft, where the sequence's own text
    has gone on otherwise.
    """

    def __init__(self, max_cached_requests: int = 0, alternatives: int = 0) -> None:
        self._most = max_cached_requests
        self._alternatives = alternatives
        self._sequences: dict[int, _Sequence] = {}
        self._answers: OrderedDict[str | None, _Answers] = OrderedDict()
        self._held = 0  # answers, and their tokens
        self._held_tokens = 0

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        self._sequences[sequence] = _Sequence(token_ids, cache_salt)

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._sequences[sequence].extend(token_ids)

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        known, answers = self._sequences, self._answers
        drafts: list[Draft] = []
        for number, count in zip(sequences, counts, strict=True):
            sequence = known[number]
            if count:
                earlier = answers.get(sequence.salt)
                drafts.append(sequence.draft(count, earlier, self._alternatives))
            else:
                drafts.append(NO_DRAFT)
        return drafts

    def end(self, sequence: int) -> None:
        ended = self._sequences.pop(sequence)
        if self._most:
            # From the token on with which it began to decode.
            self._remember(ended.salt, ended.text.tokens[ended.started - 1 :][-_REMEMBERED // 2 :])

    def _remember(self, salt: str | None, answer: list[int]) -> None:
        self._answers.setdefault(salt, _Answers()).add(answer, -(-self._most // 2))
        self._answers.move_to_end(salt)
        self._held += 1
        self._held_tokens += len(answer)
        while self._held > self._most or self._held_tokens > _REMEMBERED:
            oldest = next(iter(self._answers))
            answers = self._answers[oldest]
            count, num_tokens = answers.forget()
            self._held -= count
            self._held_tokens -= num_tokens
            if not answers.parts:
                del self._answers[oldest]
