"""The engine under a load made to measure it: equal, random, unshared prompts, all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from math import ceil
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

import octavo.loader
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.engine import Engine, Step
from octavo.engine.load import LoadedEngine, load_engine
from octavo.executor.base import Batch
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.loader import pull
from octavo.loader.base import Checkpoint, CheckpointError
from octavo.machine.limits import Limits, Progress
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request, RequestRecord

Prompts = list[list[int]]


class MeasuredPhase(NamedTuple):
    """Steps of one kind, run one after the other."""

    tokens: int  # read (prefill) or drawn (decode)
    times: list[float]  # of each step, in seconds
    batches: list[Batch]  # what was run, for the cost model: sizes and positions only
    passes: int = 0  # of decoding sequences, where there is speculation
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafts: int = 0
    accepted_per_position: tuple[int, ...] = ()
    drafting_seconds: float = 0.0
    time_saved_seconds: float = 0.0  # estimated

    @property
    def seconds(self) -> float:
        return sum(self.times)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How much is to be run at once; tokens are a sequence's."""

    sequences: int
    prompt_len: int
    output_len: int

    @property
    def name(self) -> str:
        return f"a batch of {self.sequences} × ({self.prompt_len} + {self.output_len}) tokens"


class Drive:
    """A loaded engine, and prompts to put through it.

    Decode starts from prompts that the prefix cache holds, so that all sequences begin to decode
    together, at the context asked for.
    """

    def __init__(self, loaded: LoadedEngine, seed: int = 0) -> None:
        executor = loaded.engine.executor
        self.loaded = loaded
        self.engine: Engine = loaded.engine
        self.executor = executor
        self._random = np.random.default_rng(seed)
        self._ids = count()
        self.batches: list[Batch] = []  # of the steps since it was last cleared
        self._failure: str | None = None  # why a request failed
        self.engine.observers.append(self)

    @classmethod
    def load(
        cls, model: str | Path | Checkpoint, config: EngineConfig, loads: list[BatchShape]
    ) -> Self:
        """An engine that can run each of the loads. Raises as `load_engine`, and `SettingsError`
        with the arithmetic when one of them does not fit.

        Settings that are left open become what the loads need: the cache's size, the sequences and
        the tokens of a step.
        """
        if not config.enable_prefix_caching:
            raise SettingsError("decode is measured from cached prompts: prefix caching must be on")
        if isinstance(model, str):
            model = pull.resolve(model)
        checkpoint = octavo.loader.load(model) if isinstance(model, Path) else model
        layout = config.layout_of(checkpoint.config)
        if layout.state is not None and not config.state_snapshots:
            raise SettingsError("decode is measured from cached prompts: state_snapshots is 0")
        most = min(
            config.max_model_len or checkpoint.config.context_length,
            checkpoint.config.context_length,
        )
        for load in loads:
            asked, spare = load.prompt_len + load.output_len, _spare_steps(load.sequences, config)
            if asked > most:
                raise SettingsError(
                    f"prompt and output take {asked} tokens; the model's context has {most}"
                )
            if load.output_len + spare >= most:  # `decoding` shortens prompts by as much
                raise SettingsError(
                    f"{spare} tokens come before the timed {load.output_len}; the model's context "
                    f"has {most}"
                )
        for load in loads:
            for name in ("max_num_seqs", "max_num_batched_tokens"):
                if load.sequences > getattr(config, name):
                    raise SettingsError(
                        f"batch size {load.sequences} is above {name} {getattr(config, name)}"
                    )
        needed = max(_blocks(load, config, layout) for load in loads)
        longest = min(most, max(_tokens(load, config) for load in loads))
        if config.max_model_len is None and longest > checkpoint.config.default_length:
            config = replace(config, max_model_len=longest)
        cache = config.kv_cache_memory_bytes
        if cache is None:
            config = replace(config, kv_cache_memory_bytes=needed * layout.block_bytes)
        elif cache // layout.block_bytes < needed:
            load = max(loads, key=lambda load: _blocks(load, config, layout))
            raise SettingsError(
                f"{load.name} needs {needed} KV blocks of {layout.block_bytes:,} bytes = "
                f"{needed * layout.block_bytes:,} bytes; the cache has {cache:,}"
            )
        return cls(load_engine(checkpoint, config))

    @property
    def threads(self) -> int:
        return self.executor.threads

    def working_set(self, load: BatchShape) -> int:
        """Bytes that a decode step reads, over and over: weights and cache."""
        layout = self.loaded.engine.scheduler.kv.layout
        return self.loaded.weight_bytes + load.sequences * layout.block_bytes * peak_blocks(
            layout, load.prompt_len
        )

    def limits(self, progress: Progress = lambda _: None) -> Limits:
        """The machine's, measured quickly on the engine's threads."""
        progress("measuring the machine's limits")
        return self.executor.measure_limits()

    # Being an observer

    def on_step(self, step: Step) -> None:
        self.batches.append(step.scheduled.batch.kept())

    def on_end(self, record: RequestRecord) -> None:
        self._failure = self._failure or record.error

    # Running

    def step(self) -> None:
        """A step of the engine. Raises `CheckpointError` when the model cannot run a prompt."""
        self.engine.step()
        if self._failure is not None:
            path = self.loaded.checkpoint.path
            raise CheckpointError(f"{path}: cannot be measured: {self._failure}")

    def prompts(self, load: BatchShape) -> Prompts:
        """Random token ids, so that no two prompts begin alike."""
        shape = load.sequences, load.prompt_len
        prompts: Prompts = self._random.integers(0, self.engine.vocab_size, shape).tolist()
        return prompts

    def prefill(self, prompts: Prompts) -> MeasuredPhase:
        """Read the prompts, a token drawn from each; they stay in the prefix cache."""
        self.prefill_begun(prompts)
        return self._run(self.engine.has_work, sum(map(len, prompts)))

    def prefill_begun(self, prompts: Prompts) -> None:
        """The prompts queued: the next steps read them."""
        self._add(prompts, 1)

    @contextmanager
    def decoding(self, prompts: Prompts, steps: int) -> Iterator[None]:
        """All prompts decoding, each with ``steps`` tokens or more to go, none yet timed. Prompts
        are as much shorter as the context does not hold the tokens before the timed ones.
        """
        spare = _spare_steps(len(prompts), self.loaded.config)
        room = self.loaded.max_model_len - steps - spare
        prompts = [prompt[:room] for prompt in prompts]
        requests = self._add(prompts, steps + spare)
        scheduler = self.engine.scheduler
        try:
            for _ in range(spare):
                if len(scheduler.decoding) < len(prompts):
                    self.step()
            if len(scheduler.decoding) < len(prompts):
                raise RuntimeError("the cache no longer held the prompts that were to decode")
            self.batches.clear()
            yield
        finally:
            for request in requests:
                self.engine.abort(request)
            while self.engine.has_work():
                self.engine.step()

    def decode(self, prompts: Prompts, steps: int) -> MeasuredPhase:
        """``steps`` tokens of every prompt; with speculation, as soon as each sequence has them."""
        if self.loaded.config.speculation is not None:
            return self._decode_ahead(prompts, steps)
        with self.decoding(prompts, steps):
            left = iter(range(steps))
            phase = self._run(lambda: next(left, None) is not None, len(prompts) * steps)
        if any(batch.num_tokens != len(prompts) for batch in phase.batches):
            raise RuntimeError("a decode step had other work than a token of each sequence")
        return phase

    def _decode_ahead(self, prompts: Prompts, steps: int) -> MeasuredPhase:
        """Sequences that have their tokens end, so that the last ones run in a smaller batch."""
        with self.decoding(prompts, steps):
            before = self.engine.stats()
            phase = self._run(self.engine.has_work, 0)
        after = self.engine.stats()
        return phase._replace(
            tokens=after.generation_tokens - before.generation_tokens,
            passes=after.decode_passes - before.decode_passes,
            draft_tokens=after.draft_tokens - before.draft_tokens,
            accepted_tokens=after.accepted_tokens - before.accepted_tokens,
            drafts=after.drafts - before.drafts,
            accepted_per_position=tuple(
                now - then
                for now, then in zip_longest(
                    after.accepted_per_position, before.accepted_per_position, fillvalue=0
                )
            ),
            drafting_seconds=after.drafting_seconds - before.drafting_seconds,
            time_saved_seconds=after.time_saved_seconds - before.time_saved_seconds,
        )

    def close(self) -> None:
        self.engine.close()

    def _add(self, prompts: Prompts, max_tokens: int) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [f"bench-{next(self._ids)}" for _ in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            self.engine.add_request(
                Request(request_id=request, prompt_token_ids=prompt, params=params)
            )
        return requests

    def _run(self, more: Callable[[], bool], tokens: int) -> MeasuredPhase:
        self.batches.clear()
        times = []
        while more():
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        batches, self.batches = self.batches, []
        return MeasuredPhase(tokens, times, batches)


def _spare_steps(sequences: int, config: EngineConfig) -> int:
    """Steps between the first sequence's decoding and the last's: what the cache does not hold of
    each prompt, its last block, has to be computed.
    """
    return 2 + sequences * config.block_size // config.max_num_batched_tokens


def _tokens(load: BatchShape, config: EngineConfig) -> int:
    """Positions that a sequence of the load may come to have."""
    return load.prompt_len + load.output_len + _spare_steps(load.sequences, config)


def _blocks(load: BatchShape, config: EngineConfig, layout: KvLayout) -> int:
    """KV blocks to run the load without any being taken from a cached prompt: all of each
    sequence's, whether or not a window has passed over them, and a copy of the block that it
    shares with the cached prompt. Of recurrent layers' states there are those of a running
    sequence, its last and the next one, and the two that are kept near a prompt's end, which may
    have only a share of the pool.
    """
    each = -(-_tokens(load, config) // layout.block_size) + 1
    states = (2 + 2 / config.state_snapshots) * layout.state_blocks if layout.state else 0
    return load.sequences * (each * len(layout.groups) + ceil(states))
