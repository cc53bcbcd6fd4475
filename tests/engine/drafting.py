"""Drafters for tests: they know what the sampler will draw, and make of it what they please."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.checking import VOCAB, FakeSampler, FakeState
from octavo.sample.scripted import ScriptedSampler, ScriptedState
from octavo.speculate.drafter import Draft
from octavo.speculate.speculator import Speculator


class Oracle:
    """Guesses for requests of a `FakeSampler`."""

    KINDS = (
        *("right", "wrong", "half", "short", "long", "first", "raises", "outside", "missing"),
        *("arrays", "views", "fraction", "evidence", "exits"),
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
        drafts = [self._draft(*each) for each in zip(sequences, counts, strict=True)]
        return drafts[1:] if self.kind == "missing" and self._random.random() < 0.1 else drafts

    def _draft(self, sequence: int, count: int) -> Draft:
        assert self.speculator is not None
        assert count >= 0
        if count == 0:
            return Draft([0] * 3 if self.kind == "long" else [])
        known = self.speculator._known
        seq = next(seq for seq, each in known.items() if each.number == sequence)
        assert self._texts[sequence] == seq.token_ids.tolist()
        owner = seq.owner
        generated = len(seq.token_ids) - owner.num_prompt_tokens
        rng = self._random
        length = count + 3 if self.kind == "long" else count
        if self.kind == "short":
            length = rng.randint(0, count)
        draft = []
        for at in range(length):
            state = FakeState(owner.request.params.seed or 0, seq.choice, [0] * (generated + at))
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
        known = self.speculator._known
        seq = next(seq for seq, each in known.items() if each.number == sequence)
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
