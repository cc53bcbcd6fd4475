"""Steps of the live engine, timed: a scripted load that shows it all kinds of steps.

Of the time some is spent on reading prompts to decode from, which the prefix cache then holds. Half
of the rest goes to kinds of work one by one: prompts are read in chunks of all sizes, alone and
beside others that decode; few and many sequences decode, in short and long contexts. The other half
is traffic: users who send a prompt, read the answer and send the next, few and many. There steps
follow each other as they do in serving, without pauses, and what a step finds in the caches is what
serving leaves there; but users begin at once, and leave at once when their number changes.

Steps are whole: the admission of the requests that came before them, scheduling, kernels, sampling,
text and delivery, as a request would see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from octavo.engine.engine import Engine, Step
from octavo.executor.base import Batch
from octavo.kv_cache.cache import peak_blocks
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request, RequestRecord
from octavo.tools.plan.fitting import FEWEST, Observation

SECONDS = 36.0  # of observing, together
PROBE_SECONDS = 3.0

_SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CHUNKS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MIXES = 8  # in a round: most of a load's prompts come while others decode
_RUN = 24, 8  # steps of decoding, few sequences and many: the longer, the more caches keep
_SHORT, _LONG = (16, 200), (400, 1800)  # tokens of a prompt
_MOST_SHORT, _MOST_LONG = 64, 8
_FOR_POOLS = 0.35  # of the time, to read the prompts that are decoded from
_PAUSE = 0.012  # seconds after each piece of work, so that no quota of time runs out within one


class _Traffic(NamedTuple):
    """The ranges that numbers of users and tokens are from, evenly in logarithms."""

    users: tuple[int, int]
    prompt: tuple[int, int]
    answer: tuple[int, int]
    seconds: float  # until there are more users, or fewer


_SERVED = _Traffic((1, 64), (8, 1000), (8, 128), 0.75)
_PROBED = _Traffic((1, 8), (16, 300), (16, 128), 0.5)


class Unobservable(RuntimeError):
    """The engine could not run the load."""


class _Observer:
    """Puts by the batch of the last step."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.failure: str | None = None
        self.ended = 0

    def on_step(self, step: Step) -> None:
        self.batch = step.scheduled.batch.kept()

    def on_end(self, record: RequestRecord) -> None:
        self.failure = self.failure or record.error
        self.ended += 1


def observe(
    engine: Engine,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Observation]:
    """Run the load for about ``seconds`` on an engine that has nothing else to do, without
    speculation and with prefix caching. Raises `Unobservable`.
    """
    script = _Script(engine, seconds, seed)
    try:
        script.run(progress)
    finally:
        script.close()
    return script.observations


def probe(engine: Engine, *, seconds: float = PROBE_SECONDS, seed: int = 0) -> list[Observation]:
    """Steps that tell how fast the machine is now, as of `observe`: traffic of a few users with
    short prompts, so that reading weights and computing are both seen at many moments: a shared
    machine's speed wavers within seconds. Where steps are slow it goes on until there are enough.
    """
    script = _Script(engine, seconds, seed)
    try:
        script.probe()
    finally:
        script.close()
    return script.observations


class _Script:
    def __init__(self, engine: Engine, seconds: float, seed: int) -> None:
        self.engine = engine
        self.observations: list[Observation] = []
        self._end = engine.clock.now() + seconds
        self._seconds = seconds
        self._random = np.random.default_rng(seed)
        self._ids = count()
        self._live: list[str] = []
        self._added: float | None = None  # when the first request came since the last step
        self._observer = _Observer()
        engine.observers.append(self._observer)
        limits = engine.scheduler.config
        self._most_sequences = limits.max_num_seqs
        self._most_tokens = limits.max_num_batched_tokens
        self._longest = limits.max_model_len

    def close(self) -> None:
        self._drain()
        self.engine.observers.remove(self._observer)

    def run(self, progress: Callable[[str], None]) -> None:
        self._warm_up()
        progress("reading prompts to decode from")
        affordable = self._readable(_FOR_POOLS * self._seconds)
        short = self._pool(_SHORT, _MOST_SHORT, affordable / 3)
        long = self._pool(_LONG, _MOST_LONG, affordable / 1.5)
        self._decode(short, len(short), 10)
        self._decode(long, len(long), 10)
        clock = self.engine.clock

        def goes_on() -> bool:
            left = max(0.0, self._left())
            progress(f"running the engine: {len(self.observations)} steps, {left:.0f} s to go")
            return left > 0

        while goes_on():
            began = clock.now()
            for work in self._round(short, long):
                work()
                if not goes_on():
                    return
                clock.sleep_until(clock.now() + _PAUSE)
            served_from = clock.now()
            while clock.now() - served_from < served_from - began and goes_on():
                self._serve(_SERVED)

    def probe(self) -> None:
        self._warm_up()
        while self._left() > 0 or len(self.observations) < FEWEST:
            self._serve(_PROBED)

    def _warm_up(self) -> None:
        for _ in range(2):  # the first steps find cold caches, and are no observations
            self._add(self._prompt(min(64, self._longest // 2)), 4)
            self._drained()
        self.observations.clear()

    def _readable(self, seconds: float) -> float:
        """Tokens of prompts that are read in so many seconds."""
        start = self.engine.clock.now()
        tokens = min(128, self._most_tokens, self._longest // 2)
        self._add(self._prompt(tokens), 1)
        self._drained()
        return tokens / (self.engine.clock.now() - start) * seconds

    def _left(self) -> float:
        return self._end - self.engine.clock.now()

    def _round(self, short: list[list[int]], long: list[list[int]]) -> Iterator[Callable[[], None]]:
        """Every kind of work once, in any order."""
        works: list[Callable[[], None]] = [lambda: self._mix(short + long)] * _MIXES
        for sequences in _SEQUENCES:
            if sequences <= len(short):
                works.append(lambda n=sequences: self._decode(short, n, _RUN[n > 8]))  # type: ignore
            if sequences <= len(long):
                works.append(lambda n=sequences: self._decode(long, n, 8))  # type: ignore
        longest = min(self._most_tokens, self._longest // 2)
        for length in _CHUNKS:
            if length <= longest:
                about = length * self._random.uniform(0.85, 1.15)  # not only kernels' favourites
                some = min(int(about), longest)
                works.append(lambda n=some: self._read(n))  # type: ignore
        for index in self._random.permutation(len(works)):
            yield works[index]

    # Kinds of work

    def _decode(self, pool: Sequence[list[int]], sequences: int, steps: int) -> None:
        for index in self._random.permutation(len(pool))[:sequences]:
            self._add(pool[index], steps + int(self._random.integers(0, steps)))
        scheduler = self.engine.scheduler
        while scheduler.waiting or scheduler.prefilling:
            self._step()
        self._steps(steps)
        self._drain()

    def _read(self, tokens: int) -> None:
        self._add(self._prompt(tokens), 1)
        self._drained()

    def _mix(self, pool: Sequence[list[int]]) -> None:
        """Prompts arrive while others decode, few as often as many."""
        some = self._between(1, min(len(pool), 32))
        for index in self._random.permutation(len(pool))[:some]:
            self._add(pool[index], 24)
        self._step()
        for _ in range(4):
            longest = min(self._most_tokens, self._longest // 2)
            self._add(self._prompt(self._between(min(8, longest), longest)), 8)
            self._steps(3)
        self._drain()

    def _serve(self, traffic: _Traffic) -> None:
        """Each user sends another prompt in the step behind the answer's last token."""
        low, high = traffic.users
        coming = self._between(low, min(high, self._most_sequences))
        clock = self.engine.clock
        end = clock.now() + traffic.seconds
        while clock.now() < end:
            asked = []
            for _ in range(coming):
                length = min(self._between(*traffic.prompt), self._longest // 2)
                asked.append((self._prompt(length), self._between(*traffic.answer)))
            for prompt, answer in asked:  # from here on it is time of the step
                self._add(prompt, answer)
            ended = self._observer.ended
            self._step()
            coming = self._observer.ended - ended
        self._drain()

    def _between(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``, evenly in logarithms."""
        return int(np.exp(self._random.uniform(np.log(low), np.log(high + 0.99))))

    # The engine

    def _steps(self, most: int) -> None:
        for _ in range(most):
            if self.engine.has_work():
                self._step()

    def _step(self) -> None:
        self._observer.batch = None
        start = self.engine.clock.now() if self._added is None else self._added
        self._added = None
        self.engine.step()
        seconds = self.engine.clock.now() - start
        if self._observer.failure is not None:
            raise Unobservable(self._observer.failure)
        if self._observer.batch is not None:
            self.observations.append(Observation(self._observer.batch, seconds))

    def _drained(self) -> None:
        while self.engine.has_work():
            self._step()
        self._live.clear()

    def _drain(self) -> None:
        """End what runs; the steps that deliver it are no observations."""
        for request_id in self._live:
            self.engine.abort(request_id)
        self._live.clear()
        while self.engine.has_work():
            self.engine.step()

    def _prompt(self, tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self.engine.vocab_size, tokens).tolist()
        return ids

    def _pool(self, lengths: tuple[int, int], most: int, tokens: float) -> list[list[int]]:
        """Prompts of lengths between the two, evenly in logarithms: no more tokens than given, nor
        than leave room in the cache; at least one.
        """
        kv = self.engine.scheduler.kv
        low, high = (min(length, self._longest // 2) for length in lengths)
        pool: list[list[int]] = []
        room = kv.pool.num_blocks // 3
        for _ in range(min(most, self._most_sequences)):
            length = self._between(low, high)
            tokens -= length
            room -= peak_blocks(kv.layout, length)
            if pool and (tokens < 0 or room < 0):
                break
            pool.append(self._prompt(length))
        return pool

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        most = min(max_tokens, self._longest - len(prompt))
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        request_id = f"calibrate-{next(self._ids)}"
        request = Request(request_id=request_id, prompt_token_ids=prompt, params=params)
        if self._added is None:
            self._added = self.engine.clock.now()
        self.engine.add_request(request)
        self._live.append(request_id)
