"""Take many steps at once in a simulation, where it is known beforehand what each will do.

Parts that compute nothing can foresee it, by methods of their own:

- the executor, how long steps will take: ``decode_seconds(positions)`` iterates without an end over
  the durations that `Executor.execute` would give for successive steps in which sequences, at first
  at ``positions`` [sequences], decode a token each;
- the sampler, which tokens it will draw: ``draws_to_go(state)`` is how many of the state's next
  draws certainly do not end its sequence, and ``sample_ahead(states, count)`` makes ``count`` draws
  of `Sampler.sample` for each of them, at most so many: [states, count];
- an observer: ``on_leap(leap)`` is called after the steps, in place of `Observer.on_step`.

A subclass does not inherit the promise, because it may override what is foreseen (to fail at the
n-th step, say). It leaps again when it defines the method, too.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any, NamedTuple

from octavo.engine.clock import Clock, VirtualClock
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence


class Leap(NamedTuple):
    """Steps taken at once, in each of which the same sequences drew a token and nothing else
    happened.
    """

    decodes: list[Sequence]
    times: list[float]  # clock seconds when the first began and when each ended

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @property
    def seconds(self) -> list[float]:
        """The seconds of each step."""
        return [ended - started for started, ended in pairwise(self.times)]


def foresees(part: object, method: str, foreseen: str) -> bool:
    """Return whether the part's own class defines ``method``, and no attribute of the part replaces
    the method that is ``foreseen``.
    """
    return method in vars(type(part)) and foreseen not in getattr(part, "__dict__", ())


def leap(
    executor: Any, scheduler: Scheduler, sampler: Any, clock: Clock, until: float
) -> Leap | None:
    """Take the steps that begin before ``until`` and in which the same sequences will draw a token
    each and nothing else will happen (`Scheduler.steady_steps`): scheduler, sampler, clock and
    records are then as if each had been taken. Return None, with nothing changed, if the next step
    may be different, and always if the clock is real.
    """
    if not (
        foresees(executor, "decode_seconds", "execute")
        and foresees(sampler, "sample_ahead", "sample")
        and type(clock) is VirtualClock
    ):
        return None
    limit = scheduler.steady_steps()
    decodes = scheduler.decoding[:]
    if not limit or any(seq.owner.params.logprobs is not None for seq in decodes):
        return None
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
