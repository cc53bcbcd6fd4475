"""Keeps to the schedule: each request leaves at its own time, whatever has become of the others."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from octavo.tools.bench.load.client import Client
from octavo.tools.bench.load.streamed_answer import StreamedAnswer
from octavo.tools.workload.datasets import Sample
from octavo.tools.workload.metrics import Record

LATE = 0.010  # seconds behind its time after which a request counts as late
LATE_SHARE = 0.01  # more late requests than this, and the load was not what was asked
_AHEAD = 64 << 20  # bytes of requests made before they are sent
_SPARE = 0.005  # seconds before a request's time in which no other is made
BUSY = 0.8  # of a core: beyond it the generator's own delay is in the figures


@dataclass(slots=True)
class Run:
    """What happened. ``lateness`` [sent] in seconds; ``cpu`` is the generator's share of a core."""

    records: list[Record] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    duration: float = 0.0
    cpu: float = 0.0
    sent: int = 0
    unfinished: int = 0  # sent and given up on Ctrl-C
    interrupted: bool = False
    uncounted: int = 0  # answers whose server gave no usage
    in_flight: dict[int, tuple[StreamedAnswer, int]] = field(
        default_factory=dict
    )  # and tokens asked for

    @property
    def parts(self) -> float:
        """What has come of the answers in flight, in answers."""
        return sum(min(1.0, answer.events / asked) for answer, asked in self.in_flight.values())

    @property
    def lateness_ms(self) -> dict[str, float]:
        late = np.array(self.lateness or [0.0])
        return {
            "mean_ms": float(late.mean() * 1000),
            "p99_ms": float(np.percentile(late, 99) * 1000),
            "max_ms": float(late.max() * 1000),
            "late_share": float((late > LATE).mean()),
        }


@dataclass(slots=True)
class LoadGenerator:
    """Sends ``samples`` at ``arrivals`` (seconds from the start, ascending).

    ``request`` makes the bytes of one; ``timeout`` bounds each in seconds.
    """

    client: Client
    samples: Sequence[Sample]
    arrivals: Sequence[float]
    request: Callable[[Sample], bytes]
    max_concurrency: int | None = None
    timeout: float = 6 * 3600.0
    keep_text: bool = False
    progress: Callable[[Run], None] = lambda run: None
    _run: Run = field(default_factory=Run)
    _begin: float = 0.0
    _processor: float = 0.0

    async def warm(self, count: int) -> list[StreamedAnswer]:
        """The first request ``count`` times; not measured."""
        gate = asyncio.Semaphore(self.max_concurrency or count or 1)
        data = self.request(self.samples[0])

        async def one() -> StreamedAnswer:
            async with gate:
                answer = StreamedAnswer()
                answer.start = time.perf_counter()
                await self.client.exchange(data, answer, self.timeout)
                return answer

        return list(await asyncio.gather(*(one() for _ in range(count))))

    async def run(self) -> Run:
        """All of it, or until the first SIGINT."""
        _allow_connections(len(self.samples))
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        whole = asyncio.ensure_future(self._drive())

        def interrupt() -> None:
            self._run.interrupted = True
            whole.cancel()
            loop.remove_signal_handler(signal.SIGINT)  # a second one ends the program

        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(signal.SIGINT, interrupt)
        self._started()
        try:
            await whole
        except asyncio.CancelledError:
            if not self._run.interrupted:
                raise
        finally:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGINT)
            gc.unfreeze()
        self._run.records.sort(key=lambda record: record.index)
        self._run.duration = time.perf_counter() - self._begin
        self._run.cpu = (time.process_time() - self._processor) / self._run.duration
        return self._run

    def _started(self) -> None:
        self._begin, self._processor = time.perf_counter(), time.process_time()

    async def _drive(self) -> None:
        gate = asyncio.Semaphore(self.max_concurrency) if self.max_concurrency else None
        tasks: set[asyncio.Task[None]] = set()
        showing = asyncio.ensure_future(self._show())
        ahead = _Ahead(self.samples, self.request)
        ahead.fill(math.inf)
        self._started()
        begin = self._begin
        try:
            for index, (sample, arrival) in enumerate(
                zip(self.samples, self.arrivals, strict=True)
            ):
                ahead.fill(begin + arrival - _SPARE)
                data = ahead.take()
                while (early := begin + arrival - time.perf_counter()) > 0.0005:
                    await asyncio.sleep(early)
                now = time.perf_counter()
                self._run.lateness.append(max(0.0, now - begin - arrival))
                task = asyncio.ensure_future(self._one(index, sample, data, gate, now))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                if index % 16 == 15:
                    await asyncio.sleep(0)  # a burst must not keep answers waiting
            while tasks:
                await asyncio.wait(tasks)
        finally:
            showing.cancel()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _one(
        self,
        index: int,
        sample: Sample,
        data: bytes,
        gate: asyncio.Semaphore | None,
        arrived: float,
    ) -> None:
        if gate is not None:
            await gate.acquire()
        answer = StreamedAnswer(keep_text=self.keep_text)
        answer.start = time.perf_counter()
        answer.queue_time = answer.start - arrived
        run = self._run
        run.sent += 1
        run.in_flight[index] = answer, max(1, sample.output_len)
        try:
            await self.client.exchange(data, answer, self.timeout)
            self._ended(index, sample, answer)
        except asyncio.CancelledError:
            run.unfinished += 1
            raise
        finally:
            run.in_flight.pop(index)
            if gate is not None:
                gate.release()

    def _ended(self, index: int, sample: Sample, answer: StreamedAnswer) -> None:
        tokens = answer.output_tokens
        if answer.success and tokens is None:
            self._run.uncounted += 1
        self._run.records.append(
            Record(
                index=index,
                success=answer.success,
                start=answer.start,
                prompt_len=sample.prompt_len
                if answer.prompt_tokens is None
                else answer.prompt_tokens,
                output_tokens=tokens or answer.events,
                cached_tokens=answer.cached_tokens,
                ttft=answer.ttft,
                latency=answer.latency,
                itl=answer.itl,
                queue_time=answer.queue_time,
                text=answer.text,
                reason=answer.reason,
                detail=answer.detail,
                rejected=answer.rejected,
                told=answer.told if answer.rejected else 0.0,
            )
        )

    async def _show(self) -> None:
        while True:
            self.progress(self._run)
            await asyncio.sleep(0.5)


class _Ahead:
    """Requests made before their time has come, up to `_AHEAD` bytes."""

    def __init__(self, samples: Sequence[Sample], request: Callable[[Sample], bytes]) -> None:
        self._samples = iter(samples)
        self._request = request
        self._made: deque[bytes] = deque()
        self._bytes = 0

    def fill(self, until: float) -> None:
        while self._bytes < _AHEAD and time.perf_counter() < until:
            sample = next(self._samples, None)
            if sample is None:
                return
            self._made.append(self._request(sample))
            self._bytes += len(self._made[-1])

    def take(self) -> bytes:
        if not self._made:
            return self._request(next(self._samples))
        data = self._made.popleft()
        self._bytes -= len(data)
        return data


def _allow_connections(count: int) -> None:
    """As many open files as the system lets this process have, if they may be needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
