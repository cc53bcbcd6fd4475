"""Drafters for tests: they know what the sampler will draw, and make of it what they please."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.checking import VOCAB, FakeSampler, FakeState
from octavo.engine.clock import VirtualClock
from octavo.executor.base import StepResult
from octavo.sampling.scripted import ScriptedSampler, ScriptedState
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.drafter import Draft, ModelDrafter
from octavo.spec_decode.speculator import Speculator


class Unsayable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("injected")


class Oracle:
    """Guesses for requests of a `FakeSampler`."""

    KINDS = (
        *("right", "wrong", "half", "short", "long", "first", "raises", "outside", "missing"),
        *("arrays", "views", "fraction", "evidence", "exits", "cancelled", "unsayable"),
    )

    def __init__(self, kind: str, sampler: FakeSampler) -> None:
        self.kind = kind
        self.speculator: Speculator | None = None
        self._sampler = sampler
        self._random = random.Random(0)
        self._texts: dict[int, list[int]] = {}
        self._views: list[np.ndarray[Any, Any]] = []

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        assert sequence not in self._texts
        self._texts[sequence] = list(token_ids)
        if self.kind == "views":  # kept, and written to
            self._views.append(np.asarray(token_ids))
            self._views[-1][:] = 0

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        assert token_ids
        self._texts[sequence] += token_ids

    def end(self, sequence: int) -> None:
        del self._texts[sequence]

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        if self.kind == "raises" and self._random.random() < 0.1:
            raise RuntimeError("injected")
        if self.kind == "exits" and self._random.random() < 0.1:
            raise SystemExit(3)
        if self.kind == "cancelled" and self._random.random() < 0.1:
            raise asyncio.CancelledError
        if self.kind == "unsayable" and self._random.random() < 0.1:
            raise Unsayable
        drafts = [self._draft(*each) for each in zip(sequences, counts, strict=True)]
        return drafts[1:] if self.kind == "missing" and self._random.random() < 0.1 else drafts

    def _draft(self, sequence: int, count: int) -> Draft:
        assert count >= 0
        if count == 0:
            return Draft([0] * 3 if self.kind == "long" else [])
        assert self.speculator._lookup is not None
        texts = self.speculator._lookup.texts
        seq = next(seq for seq, (number, _) in texts.items() if number == sequence)
        assert self._texts[sequence] == seq.token_ids.tolist()
        owner = seq.owner
        generated = len(seq.token_ids) - owner.prompt_tokens
        rng = self._random
        length = count + 3 if self.kind == "long" else count
        if self.kind == "short":
            length = rng.randint(0, count)
        draft = []
        for at in range(length):
            state = FakeState(owner.params.seed or 0, seq.choice, [0] * (generated + at))
            token = self._sampler.draw(state)
            wrong = {"wrong": 1.0, "half": 0.5, "first": float(at > 0)}.get(self.kind, 0.0)
            draft.append((token + 1) % VOCAB if rng.random() < wrong else token)
        if draft and self.kind == "outside" and rng.random() < 0.1:
            draft[-1] = rng.choice((-1, VOCAB))
        evidence: Any = rng.randrange(16)
        tokens: Any = np.array(draft, np.int32) if self.kind == "arrays" else draft
        if rng.random() < 0.1:
            if self.kind == "evidence":
                evidence += 0.5
            elif self.kind == "fraction":
                tokens = [token + 0.5 for token in draft]
        return Draft(tokens, evidence)


class Coin:
    """For a `ScriptedSampler`: each token is right with a certain probability."""

    def __init__(self, rate: float, sampler: ScriptedSampler) -> None:
        self.speculator: Speculator | None = None
        self._rate = rate
        self._sampler = sampler
        self._random = random.Random(3)
        self._states: dict[int, ScriptedState] = {}

    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        assert self.speculator is not None
        assert self.speculator._lookup is not None
        texts = self.speculator._lookup.texts
        seq = next(seq for seq, (number, _) in texts.items() if number == sequence)
        self._states[sequence] = seq.output.sampler

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None: ...

    def end(self, sequence: int) -> None:
        del self._states[sequence]

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        return [self._draft(*each) for each in zip(sequences, counts, strict=True)]

    def _draft(self, sequence: int, count: int) -> Draft:
        state = self._states[sequence]
        draft = []
        for _ in range(count):
            token = self._sampler._token(state)
            state.num_generated += 1
            right = self._random.random() < self._rate
            draft.append(token if right else (token + 1) % self._sampler.vocab_size)
        state.num_generated -= count
        return Draft(draft)


class Turning(Coin):
    """With an alternative that is right, with a certain probability, where the draft is wrong in
    its first token, and goes on rightly then.
    """

    def __init__(self, rate: float, turns: float, sampler: ScriptedSampler) -> None:
        super().__init__(rate, sampler)
        self._turns = turns

    def _draft(self, sequence: int, count: int) -> Draft:
        draft = super()._draft(sequence, count)
        if not count:
            return draft
        state = self._states[sequence]
        path = []
        for _ in range(min(count, 4)):
            path.append(self._sampler._token(state))
            state.num_generated += 1
        state.num_generated -= len(path)
        if path[0] == draft.token_ids[0] or self._random.random() >= self._turns:
            path[0] = (path[0] + 2) % self._sampler.vocab_size
        return draft._replace(alternatives=[path])


class Passes(ModelDrafter):
    """For a `ScriptedSampler`: each token of a draft is right with a certain
    probability, and each further token of all drafts takes ``cost`` seconds of the clock;
    ``reading`` is what each token of a text takes that it had not seen.
    """

    def __init__(
        self,
        rate: float,
        cost: float,
        sampler: ScriptedSampler,
        clock: VirtualClock,
        reading: float = 0.0,
    ) -> None:
        self.closed = False
        self.raises = ""  # name of the method that does
        self.seen = 0  # tokens of all runs
        self._rate = rate
        self.num_read = 0
        self._cost = cost
        self._reading = reading
        self._reached: dict[Seq, int] = {}
        self._sampler = sampler
        self._clock = clock
        self._random = random.Random(3)

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        self._fail("propose")
        self._clock.advance(self._cost * max(counts))
        for seq, count in zip(decoding, counts, strict=True):
            if count:
                self.num_read += self.unread(seq)
                self._clock.advance(self._reading * self.unread(seq))
                self._reached[seq] = len(seq.token_ids)
        return [self._draft(*each) for each in zip(decoding, counts, strict=True)]

    def _draft(self, seq: Seq, count: int) -> Draft:
        assert 0 <= count <= seq.num_to_come - 1
        state = seq.output.sampler.fork(seq.choice)
        draft = []
        for _ in range(count):
            token = self._sampler._token(state)
            state.num_generated += 1
            right = self._random.random() < self._rate
            draft.append(token if right else (token + 1) % self._sampler.vocab_size)
        return Draft(draft)

    def unread(self, seq: Seq) -> int:
        return len(seq.token_ids) - self._reached.get(seq, 0)

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        self._fail("observe")
        assert len(runs) == len(scheduled.samples)
        self.seen += sum(map(len, runs))

    def end(self, seq: Seq) -> None:
        self._fail("end")

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self._fail("close")

    def _fail(self, method: str) -> None:
        if self.raises == method:
            raise RuntimeError("injected")


class Heads(Passes):
    """Reads no texts; each sequence that drafts takes ``each`` seconds more, and to tell it of a
    step takes ``upkeep``, which is in no account.
    """

    def __init__(
        self,
        rate: float,
        cost: float,
        sampler: ScriptedSampler,
        clock: VirtualClock,
        each: float,
        upkeep: float,
    ) -> None:
        super().__init__(rate, cost, sampler, clock)
        self.asked = 0
        self._each = each
        self._upkeep = upkeep

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        self.asked += 1
        self._clock.advance(self._each * sum(count > 0 for count in counts))
        return super().propose(decoding, counts)

    def unread(self, seq: Seq) -> int:
        return 0

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        self._clock.advance(self._upkeep)


class Finding(Coin):
    """Finds something for some of the sequences only, and takes ``each`` seconds to look."""

    def __init__(
        self, rate: float, often: float, sampler: ScriptedSampler, clock: VirtualClock, each: float
    ) -> None:
        super().__init__(rate, sampler)
        self._often = often
        self._clock = clock
        self._each = each

    def _draft(self, sequence: int, count: int) -> Draft:
        self._clock.advance(self._each)
        return super()._draft(sequence, count if self._random.random() < self._often else 0)


class Branching(Speculator):
    """Proposes random trees, as a scheduler must be able to stand them: right continuations in the
    draft or in a branch, repeated branches, branches that begin others, empty and too long ones.
    """

    def __init__(self, oracle: Oracle, *args: Any, **kwargs: Any) -> None:
        super().__init__(oracle, *args, **kwargs)
        self.sampler = oracle._sampler
        self.rng = oracle._random
        self.trees: dict[int, list[list[int]]] = {}

    def propose(self, decoding: list[Seq], num_tokens: int, room: int) -> list[list[int]]:
        rng = self.rng
        self.trees = {}
        drafts = []
        for index, seq in enumerate(decoding):
            paths = [self._path(seq) for _ in range(rng.choice((1, 1, 2, 3, 5)))]
            if rng.random() < 0.3:
                paths.append(rng.choice(paths)[: rng.randint(0, 5)])
            if rng.random() < 0.3:
                known = rng.choice(paths)
                paths.append(known + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))])
            drafts.append(paths[0])
            if len(paths) > 1:
                self.trees[index] = paths[1:]
        return drafts

    def _path(self, seq: Seq) -> list[int]:
        """Right up to some token, and any from there on."""
        rng, sampler = self.rng, self.sampler
        length = rng.choice((0, 1, 2, 3, 5, 9, 40))
        right = rng.choice((0, 0, 1, 2, length))
        owner = seq.owner
        generated = len(seq.token_ids) - owner.prompt_tokens
        path = []
        for at in range(length):
            state = FakeState(owner.params.seed or 0, seq.choice, [0] * (generated + at))
            path.append(sampler.draw(state) if at < right else rng.randrange(sampler.vocab))
        return path

    def alternatives(self) -> dict[int, list[list[int]]]:
        return self.trees
