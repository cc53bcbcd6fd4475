"""Which of a model's layers should guess for it (spec_decode/layer_skip.py), found by measurement.

Subsets are compared where they would be used: behind the model's own greedy answers, in its own
cache. Every place of an answer is a sequence of its own, with a copy of the block that it writes
to, so that one pass of a subset over all of them says how often it agrees with the model there, and
further passes how often it goes on to agree. Layers are taken away one at a time, always the one
without which the subset agrees most (Zhang et al., "Draft & Verify", 2023, search likewise, by
Bayesian optimisation); a layer that did badly before is looked at again only when it may be the
best now (lazy evaluation: Minoux, 1978). What is reported was measured on other answers.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.config import EngineConfig, SettingsError
from octavo.executor.base import Batch, Int32
from octavo.executor.registry import executor_class
from octavo.kv_cache.layout import KvLayout
from octavo.loader import load
from octavo.loader.base import Checkpoint
from octavo.loader.pull import resolve
from octavo.loader.rounding import rounded
from octavo.machine.cpu import usable_cpus
from octavo.machine.limits import Progress
from octavo.machine.memory import available_memory
from octavo.models.config import ModelConfig
from octavo.models.families import program
from octavo.models.subset import keep_layers
from octavo.tools.quantize import fidelity
from octavo.tools.quantize.text import read_text

Layers = tuple[int, ...]

DEPTH = 8  # tokens guessed in a row
_ANSWERS = 8  # that are searched on, and as many others that are reported
_PROMPT = 128  # tokens
_HOPELESS = 0.05  # of guesses: where fewer are right, nothing is to be had
_FINALISTS = 3  # subsets that are measured in earnest
_RUNS = 20  # of a pass that is timed


class Costs(NamedTuple):
    """Seconds of passes, of one sequence."""

    verify: list[float]  # of 1, 2, … DEPTH + 1 tokens
    fixed: float  # of a draft's token, whatever the layers …
    layer: float  # … and of each layer

    def draft(self, layers: int) -> float:
        return self.fixed + layers * self.layer


class Best(NamedTuple):
    """The length of drafts that pays most."""

    length: int
    tokens_per_pass: float
    speedup: float  # over no speculation


def best_length(accepted: Sequence[float], draft: float, verify: Sequence[float]) -> Best:
    """``accepted``: how probable it is that the first, the first two, … guesses are right. A token
    of a draft takes ``draft`` seconds, a pass of 1, 2, … tokens ``verify``.
    """
    found = Best(0, 1.0, 0.0)
    expected = 1.0
    for length, chance in enumerate(accepted, 1):
        expected += chance
        speedup = expected * verify[0] / (length * draft + verify[length])
        if speedup > found.speedup:
            found = Best(length, expected, speedup)
    return found


class EliminationStep(NamedTuple):
    """A subset on the way, and how often it guesses the next token."""

    layers: Layers
    acceptance: float
    predicted: Best


def eliminate(
    sharers: Sequence[Layers],
    agreement: Callable[[Layers], float],
    costs: Costs,
    progress: Progress = lambda _: None,
) -> list[EliminationStep]:
    """From all layers on one fewer at a time, as long as more may be gained than was found.

    ``sharers``: of each layer, the layers that read its keys and values, which go when it goes.
    ``agreement``: how often a subset guesses the next token.
    """
    count = len(sharers)
    kept = list(range(count))
    steps: list[EliminationStep] = []
    found = 0.0
    # Without whom the subset does best, and how many were kept when that was seen.
    best = [(-1.0, layer, count + 1) for layer in kept]
    while len(kept) > 1:
        while True:
            score, layer, seen = best[0]
            if seen == len(kept):
                break
            without = tuple(each for each in kept if each not in (layer, *sharers[layer]))
            if layer in kept and without:
                heapq.heapreplace(best, (-agreement(without), layer, len(kept)))
            else:  # it went with the layer that it reads, or all the others would go with it
                heapq.heappop(best)
        heapq.heappop(best)
        kept = [each for each in kept if each not in (layer, *sharers[layer])]
        predicted = _predict(-score, costs, len(kept))
        steps.append(EliminationStep(tuple(kept), -score, predicted))
        found = max(found, predicted.speedup)
        progress(
            f"{len(kept)} of {count} layers: {-score:.0%} of guesses are right, "
            f"{predicted.speedup:.2f} × as fast"
        )
        # Fewer layers guess no better, and one is the least.
        if -score < _HOPELESS or _predict(-score, costs, 1).speedup <= found:
            break
    return steps


def _predict(acceptance: float, costs: Costs, layers: int) -> Best:
    """If every token of a draft were as hard to guess as the first."""
    chances = [acceptance**length for length in range(1, DEPTH + 1)]
    return best_length(chances, costs.draft(layers), costs.verify)


@dataclass(slots=True)
class _Place:
    """Where an answer could be drafted for."""

    index: int  # of the answer
    slot: int  # of the block tables
    answer: Int32
    at: int  # the last token known


class Answers:
    """A model's greedy answers in its cache, and all the places in them to draft at."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        prompts: Sequence[Int32],
        positions: int,
        progress: Progress,
    ) -> None:
        """``positions``: places, of all prompts together."""
        self.program = program(checkpoint.config)
        layout = engine.layout_of(checkpoint.config)
        size, groups = layout.block_size, len(layout.groups)
        each = -(-positions // len(prompts))
        longest = max(map(len, prompts)) + each + DEPTH
        if longest > checkpoint.config.default_length:
            raise SettingsError(
                f"prompts and answers of {longest} tokens are longer than the model's context of "
                f"{checkpoint.config.default_length}"
            )
        blocks = -(-longest // size)
        own = DEPTH // size + 2  # blocks of a place, at most
        places = each * len(prompts)
        num_blocks = (len(prompts) * blocks + places * own) * groups
        self._check_memory(checkpoint, engine, layout, num_blocks)
        self.executor = executor_class(engine.executor).load(
            checkpoint,
            self.program,
            layout,
            num_blocks=num_blocks,
            max_tokens=max(512, places),
            max_logits_rows=places,
            max_seqs=len(prompts) + places,
            max_blocks_per_seq=blocks,
            threads=engine.threads,
            isa=engine.isa,
        )
        checkpoint.release()
        self._free = iter(range(num_blocks))
        self._size = size
        self.tables = np.full((groups, len(prompts) + places, blocks), -1, np.int32)
        self.tables[:, : len(prompts)] = self._new_blocks(groups, len(prompts), blocks)
        self.answers = self._answer(prompts, each + DEPTH, progress)
        self.places: list[_Place] = []
        copies: list[tuple[int, int]] = []
        for index, (prompt, answer) in enumerate(zip(prompts, self.answers, strict=True)):
            for at in range(len(prompt), len(prompt) + each):
                slot = len(prompts) + len(self.places)
                copies += self._branch(index, slot, at)
                self.places.append(_Place(index, slot, answer, at))
        # A step of one token, which is in the cache already.
        batch = self._batch([(0, self.answers[0][:1], 0)], np.array(copies, np.int32))
        self.executor.execute(batch)

    @staticmethod
    def _check_memory(
        checkpoint: Checkpoint, engine: EngineConfig, layout: KvLayout, num_blocks: int
    ) -> None:
        needed, available = num_blocks * layout.block_bytes, available_memory()
        if needed > engine.memory_utilization * available:
            raise SettingsError(
                f"the cache for so many positions takes {needed >> 20} MiB, more than "
                f"{engine.memory_utilization:.0%} of the {available >> 20} MiB available: ask for "
                "fewer (--positions)"
            )

    def _new_blocks(self, *shape: int) -> Int32:
        count = int(np.prod(shape))
        return np.fromiter(self._free, np.int32, count).reshape(shape)

    def _branch(self, answer: int, slot: int, at: int) -> Iterable[tuple[int, int]]:
        """The slot goes on as the answer up to ``at``, and then in blocks of its own. What is to be
        copied for that.
        """
        self.tables[:, slot] = self.tables[:, answer]
        first, end = at // self._size, (at + DEPTH) // self._size + 1
        own = self._new_blocks(len(self.tables), end - first)
        copies = [*zip(self.tables[:, slot, first].tolist(), own[:, 0].tolist(), strict=True)]
        self.tables[:, slot, first:end] = own
        return copies

    def _answer(self, prompts: Sequence[Int32], length: int, progress: Progress) -> list[Int32]:
        """Each prompt and ``length`` tokens more, all but the last in the cache."""
        said = []
        for slot, prompt in enumerate(prompts):
            last = self._run([(slot, prompt, 0)], last_only=True)
            said.append([*prompt.tolist(), int(last[0])])
            progress(f"prompt {slot + 1} of {len(prompts)}")
        for count in range(1, length):
            spans = [
                (slot, np.array(text[-1:], np.int32), len(text) - 1)
                for slot, text in enumerate(said)
            ]
            for text, token in zip(said, self._run(spans).tolist(), strict=True):
                text.append(token)
            progress(f"token {count + 1} of {length} of the answers")
        return [np.array(text, np.int32) for text in said]

    def accepted(self, layers: Layers, depth: int, *, of_others: bool = False) -> list[float]:
        """How often the first, the first two, … ``depth`` guesses of these layers are right, in
        every other answer; or in the others.
        """
        number = self.executor.add_program(keep_layers(self.program, layers))
        places = [place for place in self.places if place.index % 2 == of_others]
        right = np.ones(len(places), np.bool_)
        shares: list[float] = []
        for step in range(depth):
            spans = [
                (place.slot, place.answer[place.at + step :][:1], place.at + step)
                for place in places
            ]
            guesses = self._run(spans, number)
            right &= guesses == [int(place.answer[place.at + step + 1]) for place in places]
            shares.append(float(right.mean()))
        self.executor.drop_program()
        return shares

    def seconds(self, passes: Sequence[tuple[Layers | None, int]]) -> list[float]:
        """What each pass takes at best: of these layers (None: of all) over so many tokens of one
        sequence, with the choice of the likeliest behind each. They take turns, so that what else
        the machine does meanwhile falls upon all of them.
        """
        place = self.places[0]
        numbers = [
            0 if layers is None else self.executor.add_program(keep_layers(self.program, layers))
            for layers, _ in passes
        ]
        best = [math.inf] * len(passes)
        for _ in range(_RUNS):
            for index, ((_, tokens), number) in enumerate(zip(passes, numbers, strict=True)):
                span = (place.slot, place.answer[place.at : place.at + tokens], place.at)
                began = time.perf_counter()
                self._run([span], number)
                best[index] = min(best[index], time.perf_counter() - began)
        for number in numbers:
            if number:
                self.executor.drop_program()
        return best

    def _run(
        self,
        spans: Sequence[tuple[int, Int32, int]],
        number: int = 0,
        *,
        last_only: bool = False,
    ) -> npt.NDArray[np.intp]:
        """The likeliest token behind each of the spans' tokens: (slot, tokens, first position)."""
        batch = self._batch(spans, np.empty((0, 2), np.int32))
        if last_only:
            batch.logits_rows = batch.logits_rows[-1:]
        result = self.executor.execute(batch, number)
        assert result.logits is not None
        likeliest = [result.logits.argmax(axis=1)]
        while (done := sum(map(len, likeliest))) < len(batch.logits_rows):
            assert result.logits_from is not None
            likeliest.append(result.logits_from(done).argmax(axis=1))
        return np.concatenate(likeliest)

    def _batch(self, spans: Sequence[tuple[int, Int32, int]], copies: Int32) -> Batch:
        sizes = [len(tokens) for _, tokens, _ in spans]
        total = sum(sizes)
        return Batch(
            np.concatenate([tokens for _, tokens, _ in spans]).astype(np.int32),
            np.concatenate([np.arange(at, at + len(t), dtype=np.int32) for _, t, at in spans]),
            np.cumsum([0, *sizes], dtype=np.int32),
            np.array([slot for slot, _, _ in spans], np.int32),
            self.tables,
            np.arange(total, dtype=np.int32),
            copies,
        )


def search(
    model: str,
    engine: EngineConfig,
    *,
    text: Path | None = None,
    positions: int = 256,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """What ``octavo search layer-skip --json`` prints; docs/speculation.md says what it holds.

    ``text`` None: `fidelity.default_text`. ``positions``: of the answers, that are searched on; as
    many others are reported. Raises `CheckpointError`, `SettingsError` and `TextError`.
    """
    if engine.speculation is not None:
        raise SettingsError("speculative_config has no part in the search for one")
    content = fidelity.default_text() if text is None else read_text(text, fidelity.TextError)
    where = "the default text" if text is None else str(text)
    checkpoint = load(resolve(model))
    count = len(checkpoint.config.layers)
    if count < 2:
        raise SettingsError(f"{checkpoint.path}: the model has {count} layer: none can be skipped")
    windows = fidelity.windows(
        checkpoint.tokenizer, content, min(1024, checkpoint.config.default_length), where
    )
    length = min(_PROMPT, checkpoint.config.default_length // 2)
    prompts = fidelity.prompts(windows, 2 * _ANSWERS, length)
    if len(prompts) < 2:
        raise SettingsError(f"{where}: has {len(prompts)} prompt of {length} tokens; 2 are needed")
    progress("loading")
    if engine.quantization is not None:
        threads = engine.threads or usable_cpus()[0]
        checkpoint = rounded(checkpoint, engine.quantization, threads)
    answers = Answers(checkpoint, engine, prompts, 2 * positions, progress)
    try:
        progress("timing passes")
        half = tuple(range(count // 2))
        costs = _costs(answers, count, [half])
        steps = eliminate(
            _sharers(checkpoint.config),
            lambda some: answers.accepted(some, 1)[0],
            costs,
            progress,
        )
        likeliest = sorted(steps, key=lambda step: -step.predicted.speedup)[:_FINALISTS]
        progress("measuring the best")
        costs = _costs(answers, count, [half, *(step.layers for step in likeliest)])
        rows = [_measured(answers, step.layers, costs) for step in likeliest]
    finally:
        answers.executor.close()
    best = max(rows, key=lambda row: row["speedup"])
    return {
        "model": model,
        "path": str(checkpoint.path),
        "text": where,
        "positions": sum(place.index % 2 for place in answers.places),
        "threads": answers.executor.threads,
        "num_layers": count,
        **best,
        "pays": best["speedup"] > 1.0,
        "speculative_config": {"method": "layer_skip", "layers": best["layers"]},
        "finalists": rows,
        "path_of_search": [
            {
                "num_layers": len(step.layers),
                "acceptance": step.acceptance,
                "predicted_speedup": step.predicted.speedup,
            }
            for step in steps
        ],
    }


def _sharers(config: ModelConfig) -> list[Layers]:
    """Return, of each layer, the layers that read its keys and values."""
    return [
        tuple(index for index, layer in enumerate(config.layers) if layer.shares == owner)
        for owner in range(len(config.layers))
    ]


def _costs(answers: Answers, count: int, subsets: Sequence[Layers]) -> Costs:
    """Timed with passes of ``subsets``. Layers are alike: a line through passes of several numbers
    of them is less noisy than any pass.
    """
    verifying: list[tuple[Layers | None, int]] = [(None, n) for n in range(1, DEPTH + 2)]
    drafting: list[tuple[Layers | None, int]] = [(layers, 1) for layers in subsets]
    times = answers.seconds([*verifying, *drafting])
    verify = list(accumulate(times[: DEPTH + 1], max))  # more tokens take no less
    layer, _ = np.polyfit([count, *map(len, subsets)], [verify[0], *times[DEPTH + 1 :]], 1)
    layer = min(max(float(layer), 0.0), verify[0] / count)
    return Costs(verify, verify[0] - count * layer, layer)


def _measured(answers: Answers, layers: Layers, costs: Costs) -> dict[str, Any]:
    """A subset, on answers that it was not chosen by."""
    accepted = answers.accepted(layers, DEPTH, of_others=True)
    draft = costs.draft(len(layers))
    best = best_length(accepted, draft, costs.verify)
    return {
        "layers": list(layers),
        "accepted_by_position": accepted,
        "acceptance_rate": sum(accepted[: best.length]) / best.length,
        "draft_length": best.length,
        "tokens_per_pass": best.tokens_per_pass,
        "seconds_per_guess": draft,
        "seconds_per_pass": costs.verify[best.length],
        "seconds_per_step": costs.verify[0],
        "speedup": best.speedup,
    }
