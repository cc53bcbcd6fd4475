"""Whether verification by rejection keeps the target's distribution: chi-square tests.

Two ways. The rule alone: rows of logits and guesses as they came up in an engine, each row verified
thousands of times under other seeds, the guess drawn anew from what the drafter drew it from. And
the engine as a whole: many answers to the same prompt; where they begin alike, the tokens that
follow are counted.

Probabilities are computed here, in double precision, from the logits. That the tests have teeth is
shown by a wrong rule: a rejected guess replaced by a draw from the target's distribution, not from
what the drafter left of it, max(0, p - q).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Checkpoint
from octavo.engine.engine import Step
from octavo.engine.load import EngineConfig
from octavo.execute.cpu import usable_cpus
from octavo.sample.params import SamplingParams
from octavo.sample.sampler import Sampler
from octavo.schedule.batching import Distributions
from octavo.speculate.config import SpeculativeConfig
from octavo.verify.chi_square import chi_square
from octavo.verify.faults import wrong_rule
from octavo.verify.guessing import pinned
from octavo.verify.running import Float32, Running, running
from octavo.verify.trials import Trial

FAILURES = 1e-6  # honest certificates that fail: fewer than this share
NUM_TOKENS = 3  # of a draft
POSITIONS = 4  # rows of logits that the rule is tried on
_TEMPERATURES = (0.4, 0.7, 1.0, 1.5, 2.3, 3.5)
_CANDIDATES = 12
_AT_ONCE = 512  # draws in a call of the sampler
_GROUPS = 10  # beginnings of answers whose next token is counted
_LEAST = 40  # answers in a group
_SHARE = 5  # one answer of the engine for so many draws
_TEMPERATURE = 1.5
_FEW = 6  # tokens that answers are of, so that many begin alike
_PROMPT = 60  # tokens of a question: drafters read so many at once for all answers
_NEW = 4  # tokens of an answer: the first is not drafted
_CHOICES = 64  # answers at once

Float64 = npt.NDArray[np.float64]


class Place(NamedTuple):
    """A guess that a drafter made, and the logits that it is verified by."""

    logits: Float32  # [2, vocab]: at the guess, and behind it
    guess: int
    drawn_from: Float32 | None  # [vocab]; None: certain
    params: SamplingParams  # of several those by which nearest to half of the guesses are accepted
    acceptance: float


class Result(NamedTuple):
    """Of some chi-square tests."""

    p: float  # the least, times their number: at most so probable if the distribution is right
    tests: int

    @classmethod
    def of(cls, each: Sequence[float]) -> Result:
        return cls(min(1.0, min(each) * len(each)), len(each))


@dataclass(frozen=True, slots=True)
class Distribution:
    """What the tests of a drafter came to."""

    chi_square_p: float
    tests: int
    draws: int  # for each place
    places: int
    acceptance: list[float]  # expected at each place
    answers: int  # of the engine
    counted: int  # tokens of theirs that were tested
    wrong_rule_p: float
    missed: str | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "chi_square_p": self.chi_square_p,
            "wrong_rule_p": self.wrong_rule_p,
            "chi_square_tests": self.tests,
            "chi_square_draws": self.draws * self.places + self.counted,
        }


def probabilities(logits: Float32, params: SamplingParams) -> Float64:
    """[vocab], in double precision, of a draw with temperature, top_k and allowed_token_ids. Of
    equal logits ``top_k`` keeps those with the lower ids.
    """
    scaled = logits.astype(np.float64) / params.temperature
    if params.allowed_token_ids is not None:
        forbidden = np.ones(len(scaled), np.bool_)
        forbidden[list(params.allowed_token_ids)] = False
        scaled[forbidden] = -np.inf
    if 0 < params.top_k < len(scaled):
        scaled[np.argsort(-scaled, kind="stable")[params.top_k :]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum(), np.float64)


class _Observed:
    """What an engine's steps show: places to try the rule at, and what followed each beginning."""

    def __init__(self, engine: Running) -> None:
        self.places: list[Place] = []
        self.drafts = 0
        self._exact: dict[tuple[int, ...], Float64] = {}  # by beginning
        self._counts: dict[tuple[int, ...], Counter[int]] = {}
        self._watched = engine.watched
        engine.engine.observers.append(self)

    def on_step(self, step: Step) -> None:
        scheduled = step.scheduled
        given = scheduled.probabilities
        for index, (seq, draft) in enumerate(
            zip(scheduled.decodes, scheduled.drafts or (), strict=False)
        ):
            if not draft:
                continue
            self.drafts += 1
            start = tuple(seq.token_ids)
            run = step.drawn.runs[index]
            for at in range(len(run)):
                beginning = start + tuple(run[:at])
                if beginning not in self._exact:
                    row = self._watched.row(scheduled.last_row(index, run[: at + 1]))
                    self._exact[beginning] = probabilities(row, seq.owner.request.params)
                    if at == 0:
                        q = None if given is None else given[index]
                        allowed = seq.owner.request.params.allowed_token_ids
                        self._consider(scheduled.sample_rows[index], draft, q, allowed)
                self._counts.setdefault(beginning, Counter())[run[at]] += 1

    def on_end(self, record: object) -> None:
        pass

    def _consider(
        self,
        first: int,
        draft: list[int],
        q: Distributions | None,
        allowed: tuple[int, ...] | None,
    ) -> None:
        """Keeps the draft's guesses if they are accepted half of the time or so."""
        for at, guess in enumerate(draft):
            logits = np.stack([self._watched.row(first + at), self._watched.row(first + at + 1)])
            drawn_from = None if q is None else q[at].copy()
            options = []
            for params in (
                SamplingParams(temperature=temperature, allowed_token_ids=tokens)
                for temperature in _TEMPERATURES
                for tokens in {None, allowed}
            ):
                p = probabilities(logits[0], params)
                acceptance = float(p[guess] if q is None else np.minimum(p, q[at]).sum())
                options.append(Place(logits, guess, drawn_from, params, acceptance))
            self.places.append(min(options, key=_one_sidedness))
        self.places.sort(key=_one_sidedness)
        del self.places[_CANDIDATES:]

    def groups(self) -> tuple[list[float], int]:
        """p of each large group of answers that began alike, and how many tokens were counted."""
        largest = sorted(self._counts.items(), key=lambda entry: -entry[1].total())[:_GROUPS]
        found, counted = [], 0
        for beginning, counts in largest:
            if counts.total() < _LEAST:
                continue
            p = self._exact[beginning]
            came = np.zeros(len(p), np.int64)
            for token, count in counts.items():
                came[token] = count
            found.append(chi_square(came, p))
            counted += counts.total()
        return found, counted


def _one_sidedness(place: Place) -> float:
    return abs(place.acceptance - 0.5)


def verify(
    checkpoint: Checkpoint,
    config: EngineConfig,
    trials: Sequence[Trial],
    method: SpeculativeConfig,
    draws: int,
    *,
    fault: bool = False,
) -> Distribution:
    """Test a drafter under the rule `rejection`; ``fault``: with the wrong rule in its place.

    Raises what loading an engine does, and `VerificationError`.
    """
    method = replace(pinned(method, checkpoint, NUM_TOKENS), acceptance_method="rejection")
    config = replace(
        config,
        speculative_config=method,
        threads=max(2, config.threads or usable_cpus()[0]),
        max_num_seqs=_CHOICES,
        max_num_batched_tokens=max(config.max_num_batched_tokens, _CHOICES * (1 + NUM_TOKENS)),
        enable_prefix_caching=True,
    )
    answers = max(draws // _SHARE, 2 * _LEAST)
    with running(checkpoint, config) as engine:
        own = engine.engine.sampler
        if fault:
            engine.engine.sampler = wrong_rule(own)
        observed = _Observed(engine)
        engine.answers(_questions(trials, answers), 1)
        found, counted = observed.groups()
        places = observed.places[:POSITIONS]
        if not places:
            return Distribution(0.0, 0, draws, 0, [], answers, 0, 1.0, "nothing was drafted")
        found += _tests(engine.engine.sampler, places, draws)
        wrong = Result.of(_tests(wrong_rule(own), places, draws))
    result = Result.of(found)
    return Distribution(
        result.p,
        result.tests,
        draws,
        len(places),
        [place.acceptance for place in places],
        answers,
        counted,
        wrong.p,
        None,
    )


def _questions(trials: Sequence[Trial], answers: int) -> list[Trial]:
    """Two prompts that drafters have guesses for, asked so often with other seeds in all. One
    repeats itself, and the likeliest tokens are drawn; after the other only a few tokens are
    allowed, every pair of which it has, so that whatever is drawn has occurred before.
    """
    few, pairs = _every_pair(trials[4].prompt_token_ids)
    common: dict[str, Any] = {"max_tokens": _NEW, "temperature": _TEMPERATURE, "ignore_eos": True}
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        (trials[5].prompt_token_ids[-_PROMPT:], {"top_k": _FEW}),
        (trials[4].prompt_token_ids[-_PROMPT:][len(pairs) :] + pairs, {"allowed_token_ids": few}),
    ]
    made = []
    for index in range(-(-answers // _CHOICES)):
        prompt, more = kinds[index % 2]
        choices = min(_CHOICES, answers - index * _CHOICES)
        params = SamplingParams(n=choices, seed=90_000 + index, **common, **more)
        made.append(Trial(f"question-{index}", prompt, params))
    return made


def _every_pair(prompt: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """A few tokens of a prompt, and a text of them in which each follows each."""
    few = tuple(token for token, _ in Counter(prompt).most_common(_FEW))
    text = []
    for index, token in enumerate(few):
        text.append(token)
        for other in few[index + 1 :]:
            text += [token, other]
    return few, [*text, few[0]]


def _tests(sampler: Sampler, places: Sequence[Place], draws: int) -> list[float]:
    """p of the tokens at each place, and of those behind it where the guess was accepted."""
    found = []
    for number, place in enumerate(places):
        first, second = _count(sampler, place, draws, seed=number)
        found.append(chi_square(first, probabilities(place.logits[0], place.params)))
        if second.any():
            found.append(chi_square(second, probabilities(place.logits[1], place.params)))
    return found


def _count(
    sampler: Sampler, place: Place, draws: int, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often each token came, at the place and behind it."""
    vocab = place.logits.shape[1]
    guesses = np.full(draws, place.guess)
    if place.drawn_from is not None:
        sums = np.cumsum(place.drawn_from, dtype=np.float64)
        uniform = np.random.default_rng(seed).random(draws) * sums[-1]
        guesses = np.minimum(np.searchsorted(sums, uniform, side="right"), vocab - 1)
    first, second = np.zeros(vocab, np.int64), np.zeros(vocab, np.int64)
    for begin in range(0, draws, _AT_ONCE):
        part = guesses[begin : begin + _AT_ONCE].tolist()
        states = [
            sampler.new_state(
                replace(place.params, seed=1_000_003 * seed + begin + at),
                (),
                (),
            )
            for at in range(len(part))
        ]
        sampled = sampler.verify(
            place.logits,
            [0, 1] * len(part),
            [state for state in states for _ in range(2)],
            [guess for each in part for guess in (each, -1)],
            [place.drawn_from, None] * len(part),
        )
        tokens = np.asarray(sampled.token_ids).reshape(-1, 2)
        np.add.at(first, tokens[:, 0], 1)
        behind = tokens[:, 1]
        np.add.at(second, behind[behind >= 0], 1)
    return first, second
