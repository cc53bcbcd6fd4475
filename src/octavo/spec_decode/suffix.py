"""Suffix decoding: drafts what followed the longest end of the text that occurred before, in the
same text or in earlier answers.

Matches are found as compressors find them (LZ77; hash chains as in RFC 1951, section 4): every pair
of tokens knows where it occurred before, and among the latest of these places the one that agrees
longest, backwards, is taken. While the text goes on as it did there, the match only grows and
nothing is searched. Among places that agree equally long, the most frequent next token decides
(Oliaro et al., "SuffixDecoding", 2024).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from octavo.spec_decode.drafter import NO_DRAFT, Draft
from octavo.spec_decode.ngram import continued

_MAX_PLACES = 16  # looked at in a search
_MAX_MATCH = 64  # tokens of a match that are compared
_MAX_ANSWER_TOKENS = 1_000_000  # of all earlier answers, some 160 bytes each


class _SuffixText:
    """Tokens, and for each place the previous one behind the same two tokens."""

    __slots__ = ("_earlier", "_latest", "num_answers", "tokens")

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.num_answers = 0  # that it was made of, if of any
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier = [0, 0]  # 0: there is none
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. A place is entered with the token that stands there."""
        tokens, latest, earlier = self.tokens, self._latest, self._earlier
        first = max(2, len(tokens))
        tokens.extend(token_ids)
        for place in range(first, len(tokens)):
            pair = tokens[place - 2], tokens[place - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = place

    def matches(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Return the latest places behind the last two of ``tokens``, the latest first, each with
        the number of tokens before it that are those at the end of ``tokens``.
        """
        text = self.tokens
        found: list[tuple[int, int]] = []
        place = self._latest.get((tokens[-2], tokens[-1]), 0) if len(tokens) > 1 else 0
        while place and len(found) < _MAX_PLACES:
            length, most = 2, min(place, len(tokens), _MAX_MATCH)
            while length < most and text[place - length - 1] == tokens[-length - 1]:
                length += 1
            found.append((place, length))
            place = self._earlier[place]
        return found


class _SuffixSequence:
    """A sequence's text, and the match that it follows: ``length`` tokens before ``place`` in the
    text ``source`` are those at the sequence's end.
    """

    __slots__ = ("length", "place", "salt", "source", "started", "text")

    def __init__(self, token_ids: Sequence[int], salt: str | None) -> None:
        self.text = _SuffixText(token_ids)
        self.started = len(token_ids)
        self.salt = salt
        self.source: _SuffixText | None = None
        self.place = self.length = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self.text.extend(token_ids)
        if self.source is not None:
            end = self.place + len(token_ids)
            if self.source.tokens[self.place : end] == [*token_ids]:
                self.place, self.length = end, self.length + len(token_ids)
            else:
                self.source = None

    def _search(self, answers: Sequence[_SuffixText]) -> None:
        """Follow the longest match in the text or in the answers. Among places of one text that
        agree equally long, the most frequent next token decides, then the latest place.
        """
        self.length = 0
        for text in (self.text, *answers):
            matches = text.matches(self.text.tokens)
            longest = max((length for _, length in matches), default=0)
            if longest > self.length:
                places = [place for place, length in matches if length == longest]
                ((favourite, _),) = Counter(text.tokens[at] for at in places).most_common(1)
                self.source, self.length = text, longest
                self.place = next(at for at in places if text.tokens[at] == favourite)

    def draft(self, count: int, answers: Sequence[_SuffixText], most_alternatives: int) -> Draft:
        if self.source is None:
            self._search(answers)
        if self.source is None:
            return NO_DRAFT
        tokens = self.text.tokens
        if self.source is self.text:
            draft = continued(tokens, self.place, count)
        else:
            draft = self.source.tokens[self.place : self.place + count]
        length = self.length
        evidence = length if length <= 8 else min(15, 5 + length.bit_length())
        if not most_alternatives or not draft:
            return Draft(draft, evidence)
        others: dict[int, int] = {}  # the best place by the token that follows
        for place, _ in sorted(self.text.matches(tokens), key=lambda match: -match[1]):
            if tokens[place] != draft[0]:
                others.setdefault(tokens[place], place)
        places = [*others.values()][:most_alternatives]
        return Draft(draft, evidence, [continued(tokens, place, count) for place in places])


class SuffixDrafter:
    """Implements `Drafter`.

    ``max_cached_requests`` is how many earlier answers are searched too, at most a million tokens
    of them. They serve only requests of the same cache_salt; within it, how soon a token comes may
    reveal another request's answer. The salt without an answer for longest forgets first.

    ``alternatives`` is how many other guesses come with each draft, from places where the
    sequence's own text went on differently.
    """

    def __init__(self, max_cached_requests: int = 0, alternatives: int = 0) -> None:
        self._most = max_cached_requests
        self._alternatives = alternatives
        self._sequences: dict[int, _SuffixSequence] = {}
        # By salt, the youngest last, in texts of several answers, the youngest first.
        self._answers: OrderedDict[str | None, list[_SuffixText]] = OrderedDict()
        self._held = self._held_tokens = 0  # answers, and their tokens

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        self._sequences[sequence] = _SuffixSequence(token_ids, cache_salt)

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._sequences[sequence].extend(token_ids)

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = []
        for number, count in zip(sequences, counts, strict=True):
            sequence = self._sequences[number]
            answers = self._answers.get(sequence.salt, ())
            drafts.append(sequence.draft(count, answers, self._alternatives) if count else NO_DRAFT)
        return drafts

    def end(self, sequence: int) -> None:
        ended = self._sequences.pop(sequence)
        if self._most:
            # From the token on with which it began to decode.
            answer = ended.text.tokens[ended.started - 1 :]
            self._remember(ended.salt, answer[-_MAX_ANSWER_TOKENS // 2 :])

    def _remember(self, salt: str | None, answer: list[int]) -> None:
        """Add an answer, and forget the oldest texts of the oldest salt as long as there are too
        many. A text holds up to half of all answers, so that forgetting one leaves others.
        """
        texts = self._answers.setdefault(salt, [])
        self._answers.move_to_end(salt)
        if not texts or texts[0].num_answers >= -(-self._most // 2):
            texts.insert(0, _SuffixText())
        texts[0].extend(answer)
        texts[0].num_answers += 1
        self._held += 1
        self._held_tokens += len(answer)
        while self._held > self._most or self._held_tokens > _MAX_ANSWER_TOKENS:
            oldest = next(iter(self._answers))
            text = self._answers[oldest].pop()
            self._held -= text.num_answers
            self._held_tokens -= len(text.tokens)
            if not self._answers[oldest]:
                del self._answers[oldest]
