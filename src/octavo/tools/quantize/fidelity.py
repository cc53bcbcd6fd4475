"""How far a served model's next-token distributions are from those of a reference.

A text is cut into windows that do not overlap; each begins as a prompt does, and is read by itself.
At every position the whole distributions are compared (tools/quantize/distance.py).

The reference is one of two. `Exact` is the model that a file's bytes stand for: weights dequantized
to fp32 by their definition (loader/dequantize.py), everything computed in fp32 by numpy, no
cache: what
is measured against it is all that was lost, by numbers made small as by kernels. `Served` is the
engine itself on other weights or settings: what is measured is the difference alone, which for the
same weights and settings is exactly zero.

Logits of a few rows and the residual stream of some windows are held at a time, whatever the length
of the text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import pairwise
from operator import is_
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.executor.base import Batch, Executor
from octavo.executor.reference import evaluate
from octavo.executor.reference.evaluate import WholeSequences
from octavo.loader.base import Checkpoint, CheckpointError, Tokenizer, Weight
from octavo.loader.dequantize import dequantize
from octavo.models.families import program
from octavo.models.program import (
    Embed,
    ExpertLinear,
    Logits,
    Op,
    PagedAttention,
    Values,
    soft_cap,
)
from octavo.tools.quantize.distance import Distances, distances
from octavo.tools.quantize.layers import live, split

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Progress = Callable[[str], None]

DEFAULT_TEXT = "heldout.txt"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 64  # of the greedy comparison

_LOGITS_BYTES = 32 << 20  # of logits held at a time, a side
_PASS_TOKENS = 32768  # that are begun at a time
_GROUP_TOKENS = 4096  # that the exact reference takes through a layer at once


class TextError(ValueError):
    """A text that nothing can be measured on; the message says why."""


# --- text ----------------------------------------------------------------------------------------


def default_text() -> str:
    """25 kB of prose and of this repository's own English and code, no part of which the quantizers
    learn from: from W. Morris, *News from Nowhere* (1890), chapter 24, and E. MacDowell, *Critical
    and Historical Essays* (1912), both in the public domain; docs/serving.md and models/rope.py.
    """
    return resources.files("octavo.tools.quantize").joinpath(DEFAULT_TEXT).read_text("utf-8")


def windows(
    tokenizer: Tokenizer, text: str, length: int, where: str, most: int | None = None
) -> list[Int32]:
    """The text's token ids in windows of ``length``, each beginning as a prompt begins.

    ``most``: tokens of the text that count. A last window of a single token is left out. Raises
    `TextError` for a text without two tokens.
    """
    try:
        start = tokenizer.encode("")
        ids = tokenizer.encode(text, add_special_tokens=False)[:most]
    except ValueError as error:
        raise TextError(f"{where}: cannot be tokenized: {error}") from None
    if len(ids) < 2:
        raise TextError(f"{where}: has {len(ids)} tokens; at least 2 are needed")
    step = length - len(start)
    if step < 2:
        raise TextError(f"windows of {length} tokens leave no room for two of the text")
    parts = [ids[at : at + step] for at in range(0, len(ids), step)]
    return [np.array([*start, *part], np.int32) for part in parts if len(part) > 1]


def prompts(text: Sequence[Int32], count: int, length: int) -> list[Int32]:
    """Up to ``count`` beginnings of ``length`` tokens, spread evenly over the windows."""
    places = [
        (window, at) for window in text for at in range(0, max(1, len(window) - length + 1), length)
    ]
    count = min(count, len(places))
    chosen = [places[i * len(places) // count] for i in range(count)]
    return [window[at : at + length] for window, at in chosen]


def check_vocabulary(model: Checkpoint, other: Checkpoint, text: Sequence[Int32]) -> None:
    """Raises `CheckpointError` unless ids mean the same tokens to both."""
    ours, theirs = model.config.vocab_size, other.config.vocab_size
    if ours != theirs:
        raise CheckpointError(
            f"{model.path} has a vocabulary of {ours} tokens and {other.path} of {theirs}: their "
            "distributions cannot be compared"
        )
    a, b = model.tokenizer, other.tokenizer
    for token in np.unique(np.concatenate(list(text))).tolist():
        if a.token_bytes(token) != b.token_bytes(token):
            raise CheckpointError(
                f"token {token} is {a.token_text(token)!r} in {model.path} and "
                f"{b.token_text(token)!r} in {other.path}: their vocabularies differ"
            )


# --- where logits come from ----------------------------------------------------------------------


class Distributions(Protocol):
    """Logits of sequences, some rows at a time and in order."""

    name: str
    most_rows: int

    def begin(self, sequences: Sequence[Int32]) -> None:
        """From here on `logits` is of these."""
        ...

    def logits(self, index: int, first: int, last: int) -> Float32:
        """[last - first, vocab] of positions of one sequence; valid until the next call.

        ``first`` is 0 or where the call before ended.
        """
        ...


def rows_held(vocab_size: int, most: int) -> int:
    """Rows of logits that are held at a time."""
    return min(most, max(8, _LOGITS_BYTES // (4 * vocab_size) // 8 * 8))


class Served:
    """The engine's executor: what is served, with its kernels and its cache, of which it takes the
    first blocks: nothing else may be in them.

    ``tables`` is the shape that the executor has been given block tables of.
    """

    def __init__(
        self, executor: Executor, vocab_size: int, tables: tuple[int, int, int], name: str
    ) -> None:
        self.name = name
        self.executor = executor
        self._shape = tables
        self.most_rows = rows_held(vocab_size, min(executor.max_tokens, executor.max_logits_rows))
        self._sequences: Sequence[Int32] = ()

    def begin(self, sequences: Sequence[Int32]) -> None:
        self._sequences = sequences

    def logits(self, index: int, first: int, last: int) -> Float32:
        ids = self._sequences[index]
        count = last - first
        return self._step(
            ids[first:last],
            np.arange(first, last),
            np.array([0, count]),
            np.zeros(1),
            self._tables(1, len(ids)),
            np.arange(count),
        )

    def greedy(self, prompts: Sequence[Int32], count: int) -> list[Int32]:
        """Each prompt continued by ``count`` tokens, each the likeliest: [count] a prompt."""
        tables = self._tables(len(prompts), max(map(len, prompts)) + count)
        found: list[list[int]] = []
        for slot, prompt in enumerate(prompts):
            for first in range(0, len(prompt), self.executor.max_tokens):
                ids = prompt[first : first + self.executor.max_tokens]
                logits = self._step(
                    ids,
                    np.arange(first, first + len(ids)),
                    np.array([0, len(ids)]),
                    np.array([slot]),
                    tables,
                    np.array([len(ids) - 1]),
                )
            found.append([int(logits[0].argmax())])
        lengths = np.array([len(prompt) for prompt in prompts])
        for step in range(count - 1):
            logits = self._step(
                np.array([tokens[-1] for tokens in found]),
                lengths + step,
                np.arange(len(prompts) + 1),
                np.arange(len(prompts)),
                tables,
                np.arange(len(prompts)),
            )
            for tokens, token in zip(found, logits.argmax(axis=1).tolist(), strict=True):
                tokens.append(token)
        return [np.array(tokens, np.int32) for tokens in found]

    def _tables(self, sequences: int, tokens: int) -> Int32:
        """Block tables of ``sequences`` of so many tokens, one after another in the cache."""
        groups = self._shape[0]
        blocks = -(-tokens // self.executor.layout.block_size)
        if (needed := groups * sequences * blocks) > self.executor.num_blocks:
            raise ValueError(f"{needed} KV blocks are needed, {self.executor.num_blocks} there")
        tables = np.full(self._shape, -1, np.int32)
        tables[:, :sequences, :blocks] = np.arange(needed).reshape(groups, sequences, blocks)
        return tables

    def _step(
        self,
        ids: npt.NDArray[np.integer],
        positions: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.integer],
        slots: npt.NDArray[np.generic],
        tables: Int32,
        rows: npt.NDArray[np.integer],
    ) -> Float32:
        """[rows, vocab]: all logits of one step, joined where the executor holds fewer."""
        result = self.executor.execute(
            Batch(
                token_ids=np.ascontiguousarray(ids, np.int32),
                positions=positions.astype(np.int32),
                seq_offsets=offsets.astype(np.int32),
                seq_slots=slots.astype(np.int32),
                block_tables=tables,
                logits_rows=rows.astype(np.int32),
                copies=np.zeros((0, 2), np.int32),
            )
        )
        logits = result.logits
        assert logits is not None
        assert result.logits_from is not None
        if len(logits) == len(rows):
            return logits
        parts = [logits.copy()]
        while (done := sum(map(len, parts))) < len(rows):
            parts.append(result.logits_from(done).copy())
        return np.concatenate(parts)


class Exact:
    """The model that the checkpoint's bytes stand for, in fp32 by numpy.

    Sequences go through it a layer at a time, so that a layer's numbers and, of each token, the
    residual stream are held; then the head, which stays.
    """

    def __init__(
        self, checkpoint: Checkpoint, max_model_len: int, progress: Progress = lambda _: None
    ) -> None:
        self.name = str(checkpoint.path)
        self.checkpoint = checkpoint
        self.program = program(checkpoint.config, max_model_len)
        head = self.program.ops[-1]
        assert isinstance(head, Logits)
        self._last = head
        self._progress = progress
        self._hidden: list[Float32] = []
        self._first: tuple[Sequence[Int32], list[Float32]] | None = None
        self.most_rows = rows_held(checkpoint.config.vocab_size, 1 << 16)

    @cached_property
    def _head(self) -> Float32:
        return _numbers(self.checkpoint.weights[self._last.weight])

    def begin(self, sequences: Sequence[Int32]) -> None:
        """What is begun first, a text, is kept for other models to be compared on."""
        if self._first is None:
            self._first = sequences, self._before_head(sequences)
        text, hidden = self._first
        same = len(text) == len(sequences) and all(map(is_, text, sequences))
        self._hidden = hidden if same else self._before_head(sequences)

    def logits(self, index: int, first: int, last: int) -> Float32:
        rows = self._hidden[index][first:last] @ self._head.T
        return soft_cap(rows, self._last.softcap)

    def _before_head(self, sequences: Sequence[Int32]) -> list[Float32]:
        """[tokens, hidden] of each sequence."""
        first, layers = split(self.program)
        stages: list[Sequence[Op]] = [first, *(layer.ops for layer in layers)]
        stages.append(self.program.ops[sum(map(len, stages)) : -1])
        groups = _padded(sequences)
        states: list[tuple[Values, WholeSequences]] = [({}, WholeSequences()) for _ in groups]
        last = frozenset({self._last.x})
        for number, ops in enumerate(stages):
            self._progress(f"the reference: stage {number + 1} of {len(stages)}")
            later = [op for stage in stages[number + 1 :] for op in stage]
            kept = live(later, last)
            read = {op.layer for op in later if isinstance(op, PagedAttention)}
            weights, ids = self._weights(ops, groups)
            for group, (values, kv) in zip(ids, states, strict=True):
                evaluate.run(ops, self.program.config, weights, values, group, kv)
                for name in values.keys() - kept:
                    del values[name]
                kv.keep(read)
        joined = [row for values, _ in states for row in values[self._last.x]]
        return [row[: len(ids)] for row, ids in zip(joined, sequences, strict=True)]

    def _weights(self, ops: Sequence[Op], groups: list[Int32]) -> tuple[_Weights, list[Int32]]:
        """The numbers of the weights that ``ops`` name; of an embedding only the rows of these
        tokens, as whose ids their places among those are returned.
        """
        stored = self.checkpoint.weights
        found = _Weights(stored)
        used = np.unique(np.concatenate([group.reshape(-1) for group in groups]))
        places = [np.searchsorted(used, group).astype(np.int32) for group in groups]
        for op in ops:
            if isinstance(op, Embed):
                table = [dequantize(stored[op.weight], row, row + 1) for row in used.tolist()]
                found[op.weight] = np.concatenate(table)
            elif not isinstance(op, ExpertLinear):
                for role in self.program.roles(op):
                    found[role] = _numbers(stored[role])
        return found, places


class _Weights(dict[str, Float32]):
    """Numbers by role; what is not there, of experts, is made for each use and not kept."""

    def __init__(self, stored: Mapping[str, Weight]) -> None:
        super().__init__()
        self._stored = stored

    def __missing__(self, role: str) -> Float32:
        return _numbers(self._stored[role])


def _numbers(weight: Weight) -> Float32:
    """All of a weight, with little beside it."""
    if len(weight.shape) == 1:
        return dequantize(weight)
    numbers = np.empty(weight.shape, np.float32)
    step = max(1, (4 << 20) // weight.shape[1])
    for first in range(0, len(numbers), step):
        numbers[first : first + step] = dequantize(weight, first, min(first + step, len(numbers)))
    return numbers


def _padded(sequences: Sequence[Int32]) -> list[Int32]:
    """Sequences in groups of some thousand tokens, [sequences, tokens], the shorter ones filled up:
    what follows a token does not change it.
    """
    longest = max(map(len, sequences))
    size = max(1, _GROUP_TOKENS // longest)
    rows = [np.pad(ids, (0, longest - len(ids))) for ids in sequences]
    return [np.stack(rows[at : at + size]) for at in range(0, len(rows), size)]


# --- comparing -----------------------------------------------------------------------------------


def compare(
    model: Distributions,
    other: Distributions,
    text: Sequence[Int32],
    *,
    threads: int = 1,
    progress: Progress = lambda _: None,
) -> Distances:
    """The model's distances from ``other``, the reference, at every position.

    Raises `CheckpointError` where logits are not finite numbers.
    """
    parts: list[Distances] = []
    most = min(model.most_rows, other.most_rows)
    done, total = 0, sum(map(len, text))
    with ThreadPoolExecutor(threads) as pool:
        for windows in _passes(text):
            other.begin(windows)
            model.begin(windows)
            for index, ids in enumerate(windows):
                for first in range(0, len(ids), most):
                    last = min(first + most, len(ids))
                    p, q = other.logits(index, first, last), model.logits(index, first, last)
                    following = ids[first + 1 : last + 1]
                    cuts = np.linspace(0, last - first, threads + 1).astype(int).tolist()
                    spans = [slice(a, b) for a, b in pairwise(cuts)]
                    found = [pool.submit(distances, p[s], q[s], following[s]) for s in spans]
                    parts += [each.result() for each in found]
                    if not all(np.isfinite(part.kl).all() for part in parts[-threads:]):
                        name = model.name if np.isfinite(p).all() else other.name
                        raise CheckpointError(f"{name}: logits of the text are not finite numbers")
                    done += last - first
                    progress(f"comparing: {done} of {total} positions")
    return Distances(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _passes(text: Sequence[Int32]) -> Iterator[list[Int32]]:
    """The windows in groups of so many tokens as the reference may hold a residual stream of."""
    size = max(1, _PASS_TOKENS // max(map(len, text)))
    return (list(text[at : at + size]) for at in range(0, len(text), size))


# --- greedy decoding -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Divergence:
    """How many greedy tokens of the model are the reference's, up to the first that is not.

    A prompt that never diverges counts as ``tokens``, all that were compared.
    """

    tokens: int
    positions: tuple[int, ...]  # of each prompt

    @property
    def first(self) -> int:
        return min(self.positions)

    @property
    def median(self) -> float:
        return statistics.median(self.positions)

    @property
    def never(self) -> int:
        """Prompts that did not diverge."""
        return sum(position == self.tokens for position in self.positions)


def divergence(
    model: Served, other: Distributions, prompts: Sequence[Int32], tokens: int
) -> Divergence:
    """The model decodes; the reference reads what it wrote, and says of each token whether it would
    have been its own. Up to the first that is not, both have seen the same.
    """
    drawn = model.greedy(prompts, tokens)
    sequences = [np.concatenate(pair).astype(np.int32) for pair in zip(prompts, drawn, strict=True)]
    other.begin(sequences)
    positions = []
    for index, (prompt, own) in enumerate(zip(prompts, drawn, strict=True)):
        likeliest: list[int] = []
        end = len(sequences[index]) - 1
        for first in range(0, end, other.most_rows):
            logits = other.logits(index, first, min(first + other.most_rows, end))
            likeliest += logits.argmax(axis=1).tolist()
        differs = np.array(likeliest[len(prompt) - 1 :]) != own
        positions.append(int(differs.argmax()) if differs.any() else tokens)
    return Divergence(tokens, tuple(positions))
