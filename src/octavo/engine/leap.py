"""Many steps at once, for simulations: where it is known beforehand what each of them will do.

Who computes nothing can say what would come: an executor the seconds of the steps, a sampler the
tokens, an observer that a summary will do. They say so by methods of their own (`ForeseenSteps`,
`ForeseenDraws`, `LeapObserver`), and a subclass does not inherit the promise: it may have
overridden what was promised of, to fail at the n-th step, say. It leaps again when it defines the
method, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol, TypeGuard

from octavo.engine.clock import Clock, VirtualClock
from octavo.executor.base import Int32
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence as Seq


class Leap(NamedTuple):
    """Steps taken at once, in each of which the same sequences drew a token and nothing else
    happened.
    """

    decodes: list[Seq]
    times: list[float]  # clock seconds when the first began and when each ended

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @property
    def seconds(self) -> list[float]:
        """Of each step."""
        return [ended - started for started, ended in pairwise(self.times)]


class ForeseenSteps(Protocol):
    """An executor without numbers."""

    def decode_seconds(self, positions: Int32) -> Iterator[float]:
        """The durations that `Executor.execute` would give for successive steps in which
        sequences, at first at ``positions`` [sequences], decode a token each; without an end.
        """
        ...


class ForeseenDraws(Protocol):
    """A sampler without logits."""

    def draws_to_go(self, state: Any) -> int:
        """How many of the state's next draws certainly do not end its sequence."""
        ...

    def sample_ahead(self, states: Sequence[Any], count: int) -> Int32:
        """[states, count]: what ``count`` times `Sampler.sample` would draw, at most `draws_to_go`;
        the states have then drawn it.
        """
        ...


class LeapObserver(Protocol):
    """An observer that does not need to see every step for itself."""

    def on_leap(self, leap: Leap) -> None:
        """Told in place of `Observer.on_step`, after the steps."""
        ...


def _promises(of: object, method: str, about: str) -> bool:
    """Whether the class itself defines the method, and nobody has put another ``about`` over the
    class's.
    """
    return method in vars(type(of)) and about not in getattr(of, "__dict__", ())


def _foresees_steps(executor: object) -> TypeGuard[ForeseenSteps]:
    return _promises(executor, "decode_seconds", "execute")


def _foresees_draws(sampler: object) -> TypeGuard[ForeseenDraws]:
    return _promises(sampler, "sample_ahead", "sample")


def takes_leaps(observer: object) -> TypeGuard[LeapObserver]:
    return _promises(observer, "on_leap", "on_step")


def leap(
    executor: object, scheduler: Scheduler, sampler: object, clock: Clock, until: float
) -> Leap | None:
    """Take the steps that begin before ``until`` and in which the same sequences will draw a token
    each and nothing else will happen (`Scheduler.steady_steps`): scheduler, sampler, clock and
    records are then as if each had been taken. None, and nothing is changed, if the next step may
    be another, and always where the time is real.
    """
    if not (_foresees_steps(executor) and _foresees_draws(sampler) and type(clock) is VirtualClock):
        return None
    limit = scheduler.steady_steps()
    if not limit or any(seq.output.wants_logprobs for seq in scheduler.decoding):
        return None
    decodes = scheduler.decoding[:]
    states = [seq.output.sampler for seq in decodes]
    limit = min(limit, *map(sampler.draws_to_go, states))
    now = clock.now()
    times = [now]
    for seconds in islice(executor.decode_seconds(scheduler.decode_positions()), limit):
        if now >= until:
            break
        clock.advance(seconds)
        now = clock.now()
        times.append(now)
    taken = Leap(decodes, times)
    steps, ended = taken.steps, times[-1]
    if not steps:
        return None
    scheduler.leap(sampler.sample_ahead(states, steps))
    for seq in decodes:
        seq.output.num_tokens += steps
        record = seq.owner
        record.completion_tokens += steps
        record.last_token = ended
    return taken
