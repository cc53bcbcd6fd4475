"""Whether verification by rejection keeps the target's distribution: chi-square tests.

Two ways. The rule alone: rows of logits and guesses as they came up in an engine, each row verified
thousands of times under other seeds, the guess drawn anew from what the drafter drew it from. And
the engine as a whole: many answers to the same prompt; where they begin alike, the tokens that
followed are counted, if there was a draft for them.

Probabilities are computed here, in double precision, from the logits. That the tests have teeth is
shown by a wrong rule: a rejected guess replaced by a draw from the target's distribution, not from
what the drafter left of it, max(0, p - q).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Step
from octavo.loader.base import Checkpoint
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Distributions
from octavo.spec_decode.config import SpeculativeConfig
from octavo.spec_decode.heads import read_heads
from octavo.tools.verify.bits import threads_of
from octavo.tools.verify.chi_square import chi_square
from octavo.tools.verify.faults import wrong_rule
from octavo.tools.verify.guessing import pinned
from octavo.tools.verify.running import Float32, Running, running
from octavo.tools.verify.trials import Trial

# Honest certificates that fail by p, less than one in a million: Pearson's p, so far out and with
# cells of a hundred, is up to fifty times too small (the test of `chi_square` sums it up exactly).
FAILURES = 1e-8
LEAST_EXPECTED = 100.0  # draws of a cell
NUM_TOKENS = 3  # of a draft
POSITIONS = 4  # rows of logits that the rule is tried on
_TEMPERATURES = (0.4, 0.7, 1.0, 1.5, 2.3, 3.5, 10.0)
_CANDIDATES = 12
_AT_ONCE = 512  # draws in a call of the sampler
_LEAST_ANSWERS = 640
_SHARE = 5  # one answer of the engine for so many draws
_FEW = 2  # tokens that answers are of, so that many begin alike …
_FLAT = 10.0  # … and a temperature at which each is drawn often, whichever the model prefers
_NEW = 4  # tokens of an answer: the first is not drafted
_VARIED = 32  # answers of any tokens
_TOP_K = 6  # of these
_TEMPERATURE = 1.5
_BLOCKS = 2  # of a prompt, and a token: drafters that read find nearly all of it in their cache
_AT_A_TIME = 64  # answers

Float64 = npt.NDArray[np.float64]


class VerifiedGuess(NamedTuple):
    """A guess that a drafter made, and the logits that it is verified by."""

    logits: Float32  # [2, vocab]: at the guess, and behind it
    guess: int
    drawn_from: Float32 | None  # [vocab]; None: certain
    params: SamplingParams  # of several those by which a wrong rule shows best
    effect: float  # of the wrong rule on a draw


class Result(NamedTuple):
    """The result of some chi-square tests."""

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
    counted: int  # tokens of the engine's answers that were tested
    wrong_rule_p: float
    missed: str | None

    @property
    def rule_draws(self) -> int:
        return self.draws * self.places

    def as_dict(self) -> dict[str, Any]:
        return {
            "chi_square_p": self.chi_square_p,
            "wrong_rule_p": self.wrong_rule_p,
            "chi_square_tests": self.tests,
            "rule_draws": self.rule_draws,
            "engine_draws": self.counted,
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


class _Group:
    """What followed where answers had begun alike, of the few tokens they may be of; and whatever
    else came, which is one cell of probability 0.
    """

    def __init__(self, few: Sequence[int], p: Float64) -> None:
        self._cells = {token: cell for cell, token in enumerate(few)}
        self.p = np.append(p[list(few)], 0.0)
        self.counts = np.zeros(len(self.p), np.int64)

    def add(self, token: int) -> None:
        self.counts[self._cells.get(token, -1)] += 1

    @property
    def large(self) -> bool:
        """Whether there is something to compare."""
        return int((self.p * self.counts.sum() >= LEAST_EXPECTED).sum()) > 1


class _Observed:
    """What an engine's steps show: places to try the rule at, and what followed each beginning."""

    def __init__(self, engine: Running, draws: int) -> None:
        self._draws = draws  # at each place
        self.places: list[VerifiedGuess] = []
        self._seen: set[tuple[int, ...]] = set()  # beginnings that there were drafts for
        self._groups: dict[tuple[int, ...], _Group] = {}  # by beginning
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
            start = tuple(seq.token_ids)
            run = step.drawn.runs[index]
            params = seq.owner.params
            if start not in self._seen:
                self._seen.add(start)
                q = None if given is None else given[index]
                allowed = params.allowed_token_ids
                self._consider(scheduled.sample_rows[index], draft, q, allowed)
            if params.allowed_token_ids is None:
                continue
            for at, token in enumerate(run):
                beginning = start + tuple(run[:at])
                if beginning not in self._groups:
                    row = self._watched.row(scheduled.last_row(index, run[: at + 1]))
                    p = probabilities(row, params)
                    self._groups[beginning] = _Group(params.allowed_token_ids, p)
                self._groups[beginning].add(token)

    def on_end(self, record: object) -> None:
        pass

    def _consider(
        self,
        first: int,
        draft: list[int],
        q: Distributions | None,
        allowed: tuple[int, ...] | None,
    ) -> None:
        """Keeps the draft's guesses if a wrong rule would show there."""
        for at, guess in enumerate(draft):
            logits = np.stack([self._watched.row(first + at), self._watched.row(first + at + 1)])
            drawn_from = None if q is None else q[at].copy()
            options = []
            for params in (
                SamplingParams(temperature=temperature, allowed_token_ids=tokens)
                for temperature in _TEMPERATURES
                for tokens in (allowed, _with_others(allowed, logits[0]), None)
            ):
                effect = self._effect(probabilities(logits[0], params), guess, drawn_from)
                options.append(VerifiedGuess(logits, guess, drawn_from, params, effect))
            self.places.append(max(options, key=_effect))
        self.places.sort(key=_effect, reverse=True)
        del self.places[_CANDIDATES:]

    def _effect(self, p: Float64, guess: int, q: Float32 | None) -> float:
        """What the wrong rule adds to chi-square with every draw. By it a token comes with
        probability min(p, q) + (1 - a) p and not p, where a is the sum of min(p, q): that makes
        the sum of min(p, q)² / p, less a², over the cells that are large enough. For a certain
        guess it is a (1 - a), most where half of the guesses are accepted.
        """
        accepted = np.zeros(len(p))
        if q is None:
            accepted[guess] = p[guess]
        else:
            np.minimum(p, q, out=accepted)
        large = p * self._draws >= LEAST_EXPECTED
        cells = np.append(p[large], max(1e-9, 1 - p[large].sum()))
        mine = np.append(accepted[large], accepted[~large].sum())
        return float((mine**2 / cells).sum() - accepted.sum() ** 2)

    def groups(self) -> list[_Group]:
        """Those with something to compare."""
        return [group for group in self._groups.values() if group.large]


def _with_others(few: tuple[int, ...] | None, logits: Float32) -> tuple[int, ...] | None:
    """As many likely tokens besides: a drafter that has drawn from the few leaves room for these,
    which is where a wrong rule shows, however alike the few are to it and to the model.
    """
    if few is None:
        return None
    others = logits.copy()
    others[list(few)] = -np.inf
    return few + tuple(np.argpartition(-others, len(few))[: len(few)].tolist())


def _effect(place: VerifiedGuess) -> float:
    return place.effect


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
        threads=threads_of(config),
        max_num_seqs=_AT_A_TIME,
        max_num_batched_tokens=max(config.max_num_batched_tokens, _AT_A_TIME * (1 + NUM_TOKENS)),
        enable_prefix_caching=True,
    )
    few = _few(trials[4].prompt_token_ids, method, checkpoint)
    questions = _questions(trials, few, max(draws // _SHARE, _LEAST_ANSWERS), config.block_size)
    with running(checkpoint, config) as engine:
        own = engine.engine.sampler
        if fault:
            engine.engine.sampler = wrong_rule(own)
        observed = _Observed(engine, draws)
        engine.answers(questions, _AT_A_TIME)
        places = observed.places[:POSITIONS]
        if not places:
            return Distribution(0.0, 0, draws, 0, 0, 1.0, "nothing was drafted")
        found = _tests(engine.engine.sampler, places, draws)
        wrong = Result.of(_tests(wrong_rule(own), places, draws))
    groups = observed.groups()
    found += [chi_square(group.counts, group.p, LEAST_EXPECTED) for group in groups]
    result = Result.of(found)
    return Distribution(
        result.p,
        result.tests,
        draws,
        len(places),
        sum(int(group.counts.sum()) for group in groups),
        wrong.p,
        None if groups else "too few answers of the engine were drafted for",
    )


def _few(
    prompt: Sequence[int], method: SpeculativeConfig, checkpoint: Checkpoint
) -> tuple[int, ...]:
    """The commonest tokens of a prompt; of those that heads guess, if it is heads."""
    tokens = [token for token, _ in Counter(prompt).most_common()]
    if method.method == "medusa":
        guessed = read_heads(Path(method.model or ""), checkpoint).token_map.tolist()
        tokens = list(dict.fromkeys([token for token in tokens if token in guessed] + guessed))
    return tuple(tokens[:_FEW])


def _questions(
    trials: Sequence[Trial], few: tuple[int, ...], answers: int, block_size: int
) -> list[Trial]:
    """Two prompts that drafters have guesses for, asked with a seed of its own each time. One
    repeats itself, and the likeliest tokens are drawn; to the other so many ``answers`` come, of a
    ``few`` tokens every pair of which it has, so that whatever is drawn has occurred before.
    """
    length = _BLOCKS * block_size + 1
    common: dict[str, Any] = {"max_tokens": _NEW, "ignore_eos": True}
    varied = common | {"temperature": _TEMPERATURE, "top_k": _TOP_K}
    flat = common | {"temperature": _FLAT, "allowed_token_ids": few}
    repeating = trials[5].prompt_token_ids[-length:]
    pairing = (trials[4].prompt_token_ids + _every_pair(few))[-length:]
    kinds = [(repeating, varied)] * _VARIED + [(pairing, flat)] * answers
    return [
        Trial(f"question-{index}", prompt, SamplingParams(seed=90_000 + index, **more))
        for index, (prompt, more) in enumerate(kinds)
    ]


def _every_pair(few: Sequence[int]) -> list[int]:
    """A text of a few tokens in which each follows each."""
    text = []
    for index, token in enumerate(few):
        text.append(token)
        for other in few[index + 1 :]:
            text += [token, other]
    return [*text, few[0]]


def _tests(sampler: Sampler, places: Sequence[VerifiedGuess], draws: int) -> list[float]:
    """p of the tokens at each place, and of those behind it where the guess was accepted."""
    found = []
    for number, place in enumerate(places):
        first, second = _count(sampler, place, draws, seed=number)
        p = probabilities(place.logits[0], place.params)
        found.append(chi_square(first, p, LEAST_EXPECTED))
        if second.any():
            p = probabilities(place.logits[1], place.params)
            found.append(chi_square(second, p, LEAST_EXPECTED))
    return found


def _count(
    sampler: Sampler, place: VerifiedGuess, draws: int, seed: int
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
