"""Logits of the same request under other circumstances, compared bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from octavo.engine.config import EngineConfig
from octavo.kv_cache.cache import peak_blocks
from octavo.loader.base import Checkpoint
from octavo.machine.cpu import usable_cpus
from octavo.tools.verify.faults import FlippedBit
from octavo.tools.verify.running import Answers, Float32, Key, running
from octavo.tools.verify.trials import COUNT, Trial

_WARMED = 2  # prompts, where the pool is small
_KEPT_BYTES = 128 << 20  # of the logits that others are compared with


def threads_of(config: EngineConfig) -> int:
    """Threads that everything but the reference runs on: the user's or all, and at least two, or
    the numbers of threads would not be compared.
    """
    return max(2, config.threads or usable_cpus()[0])


class Reference:
    """What the trials get alone: one at a time, on one thread, each prompt in one piece, without
    cached prefixes or drafts. Of every row of logits a digest is kept, and of as many as a bounded
    memory holds the row itself, to say which bits differ.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, trials: Sequence[Trial]):
        self._digests: dict[tuple[Key, int], bytes] = {}
        self._rows: dict[tuple[Key, int], Float32] = {}
        rows = sum(trial.params.n * (trial.params.max_tokens or 0) for trial in trials)
        row_bytes = 4 * checkpoint.config.vocab_size
        self._stride = max(1, -(-rows * row_bytes // _KEPT_BYTES))
        self.trials = trials
        self.config = sized(config, trials)
        alone = replace(
            self.config,
            threads=1,
            max_num_seqs=max(trial.params.n for trial in trials),
            max_num_batched_tokens=max(len(trial.prompt_token_ids) for trial in trials),
            enable_prefix_caching=False,
        )
        with running(checkpoint, alone, row=self._keep) as engine:
            self.isa = engine.loaded.engine.executor.capabilities.tier
            self.answers: Answers = engine.answers(trials, 1)

    def _keep(self, key: Key, at: int, row: Float32) -> None:
        if len(self._digests) % self._stride == 0:
            self._rows[key, at] = row.copy()
        self._digests[key, at] = _digest(row)

    def row(self, key: Key, at: int) -> Float32 | None:
        """[vocab], if it was kept."""
        return self._rows.get((key, at))

    def agrees(self, key: Key, at: int, row: Float32) -> bool | None:
        """Whether the row is the same to the bit; None: there was none."""
        digest = self._digests.get((key, at))
        return None if digest is None else digest == _digest(row)


def _digest(row: Float32) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest()


class Comparison:
    """Counts the bits that differ from a reference; of a row that it has only a digest of, one."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.rows = 0
        self.differing_bits = 0
        self.differing_rows = 0
        self.first: str | None = None  # of the rows that differ

    def __call__(self, key: Key, at: int, row: Float32) -> None:
        agrees = self._reference.agrees(key, at, row)
        if agrees is None:
            return
        self.rows += 1
        if agrees:
            return
        self.differing_rows += 1
        expected = self._reference.row(key, at)
        where = f"{key[0]}, answer {key[1]}, token {at}"
        if expected is None:
            self.differing_bits += 1
            self.first = self.first or f"{where}: at least 1 of {32 * len(row):,} bits"
            return
        differing = row.view(np.uint32) ^ expected.view(np.uint32)
        bits = int(np.unpackbits(differing.view(np.uint8)).sum())
        self.differing_bits += bits
        if self.first is None:
            logit = int(np.flatnonzero(differing)[0])
            self.first = (
                f"{where}: {bits} of {32 * len(row):,} bits, first in logit {logit}, "
                f"{row[logit]:.9g} and not {expected[logit]:.9g}"
            )


@dataclass(frozen=True, slots=True)
class Condition:
    """How the trials ran, and how many bits of their logits were not those of the reference."""

    name: str
    what: str  # for people, with figures of what really happened
    cases: int  # answers compared
    rows: int  # of logits, compared
    differing_bits: int  # at least
    equal: bool  # tokens, text, logprobs and ends too
    first: str | None  # difference
    missed: str | None  # what should have happened and did not

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Circumstance:
    """An engine unlike the reference's."""

    name: str
    changes: dict[str, Any]
    batch: int
    warm: bool = False  # the prompts, or most of each, are in the cache already
    pools: tuple[int, ...] = ()  # bytes of KV cache, to be tried until somebody is preempted


def circumstances(checkpoint: Checkpoint, config: EngineConfig) -> list[Circumstance]:
    """``config`` is the reference's, for all trials."""
    assert config.max_model_len is not None
    layout = config.layout_of(checkpoint.config)
    least = peak_blocks(layout, config.max_model_len)
    pools = tuple(blocks * layout.block_bytes for blocks in range(least, least + 16, 2))
    threads = {"threads": threads_of(config)}
    fresh = threads | {"enable_prefix_caching": False}
    shared = threads | {"enable_prefix_caching": True}
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 13}
    return [
        Circumstance("threads", fresh, 1),
        Circumstance("crowded", fresh, COUNT),
        Circumstance("chunked", fresh | small, COUNT),
        Circumstance("cached", shared, COUNT, warm=True),
        Circumstance("preempted", fresh, COUNT, pools=pools),
        Circumstance("together", shared | small, COUNT, warm=True, pools=pools),
    ]


def compare(
    checkpoint: Checkpoint,
    reference: Reference,
    circumstance: Circumstance,
    fault: FlippedBit | None = None,
) -> Condition:
    """Run the trials so. Raises what loading an engine does, and `VerificationError`."""
    config = replace(reference.config, **circumstance.changes)
    if not circumstance.pools:
        return _run(checkpoint, reference, circumstance, config, fault)
    for pool in circumstance.pools:
        sized = replace(config, kv_cache_memory_bytes=pool)
        condition = _run(checkpoint, reference, circumstance, sized, fault)
        if condition.missed is None or condition.differing_bits:
            break
    return condition


def _run(
    checkpoint: Checkpoint,
    reference: Reference,
    circumstance: Circumstance,
    config: EngineConfig,
    fault: FlippedBit | None,
) -> Condition:
    comparison = Comparison(reference)
    trials = list(reference.trials)
    if circumstance.pools:  # short prompts, which have the long answers, are many at once then
        trials.sort(key=lambda trial: len(trial.prompt_token_ids))
    with running(checkpoint, config, row=comparison, change=fault) as engine:
        if circumstance.warm:
            warming = trials
            if circumstance.pools:
                warming = _cacheable(trials, config.block_size)[:_WARMED]
                trials.sort(key=lambda trial: trial not in warming)
            engine.answers([_warming(trial) for trial in warming], circumstance.batch)
        before = engine.stats
        answers = engine.answers(trials, circumstance.batch)
        after = engine.stats
    preemptions = after.preemptions - before.preemptions
    cached = after.prefix_hits - before.prefix_hits
    what, missed = [], []
    if circumstance.batch == 1:
        what.append(f"{config.threads} threads")
    else:
        what.append(f"{config.max_num_seqs} sequences at most")
    if config.max_num_batched_tokens < reference.config.max_num_batched_tokens:
        what.append(f"pieces of {config.max_num_batched_tokens} tokens at most")
    if circumstance.warm:
        what.append(f"{cached:,} prompt tokens from the cache")
        missed += [] if cached else ["no prompt was found in the cache"]
    if circumstance.pools:
        what.append(f"{preemptions} preemptions")
        missed += [] if preemptions else ["nobody was preempted"]
    if not comparison.rows:
        missed.append("no row of logits was compared")
    return Condition(
        circumstance.name,
        ", ".join(what),
        sum(trial.params.n for trial in trials),
        comparison.rows,
        comparison.differing_bits,
        answers == reference.answers,
        comparison.first,
        "; ".join(missed) or None,
    )


def _cacheable(trials: Sequence[Trial], block_size: int) -> list[Trial]:
    """Those that find a block or more of their prompts in a cache that has been warmed."""
    return [
        trial
        for trial in trials
        if len(_warming(trial).prompt_token_ids) > block_size
        and trial.params.prompt_logprobs is None
    ]


def _warming(trial: Trial) -> Trial:
    """Leaves all of a prompt, or two thirds of it, in the cache."""
    ids = trial.prompt_token_ids
    if trial.params.seed and trial.params.seed % 2:
        ids = ids[: max(1, 2 * len(ids) // 3)]
    params = replace(trial.params, n=1, max_tokens=1, prompt_logprobs=None)
    return Trial(f"warming {trial.name}", ids, params)


def sized(config: EngineConfig, trials: Sequence[Trial]) -> EngineConfig:
    """The user's settings, as large as the trials need and no larger."""
    longest = max(len(trial.prompt_token_ids) + (trial.params.max_tokens or 0) for trial in trials)
    return replace(
        config,
        max_model_len=longest,
        max_num_seqs=sum(trial.params.n for trial in trials),
        max_num_batched_tokens=max(config.max_num_batched_tokens, 64),
        kv_cache_memory_bytes=None,
        speculative_config=None,
    )
