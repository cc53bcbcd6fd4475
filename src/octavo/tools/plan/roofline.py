"""Where decode and prefill lie under a device's roof, and the latencies that follow from it.

The roof (Williams, Waterman and Patterson, 2009): with I operations a byte moved, a device does at
most min(peak, I · bandwidth) operations a second. The accounting is that of Pope et al. (2023),
section 2: a dense model of N parameters takes 2N operations a token and reads its weights once a
step, whatever the step's tokens; attention reads each sequence's own keys and values, so that its
intensity stays where it is however large the batch. All is counted from the Program by `CostModel`,
which is also the simulator's clock; a device is one chip, and nothing is said of several.

Bounds and crossings are of the roof. Latencies are predictions: where nobody has measured a device,
they take the shares of its roof that `Device.predicted` assumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from octavo.executor.base import Batch
from octavo.executor.cost import Arithmetic, CostModel, Rates
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.tools.plan.defaults import GPU
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.phase import MOST_SEQUENCES, Phase, chunked, crossing, decode_batch, phase
from octavo.tools.plan.quantization import StoredWeights, cost_model
from octavo.tools.plan.subject import Subject


class Roof(NamedTuple):
    """The flat part of one arithmetic's roof."""

    arithmetic: Arithmetic
    ops_per_second: float
    ridge: float  # operations a byte from which it bounds, not memory


@dataclass(frozen=True, slots=True)
class Point:
    """An operating point: a decode step of ``sequences``, or the prefill of one prompt."""

    sequences: int
    context: int  # tokens in the cache of each sequence that decodes; tokens of the prompt
    phase: Phase
    seconds: float  # predicted, of the step or of the prompt's steps, with their overhead
    seconds_at_roof: float  # what nothing can be faster than
    bytes_held: int  # weights, and the cache of these sequences
    fits: bool | None  # in the device's memory, of a GPU in what an engine uses; None: not known

    @property
    def tokens_per_second(self) -> float:
        return self.phase.tokens / self.seconds

    @property
    def ops_per_second(self) -> float:
        return self.phase.ops / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the predicted time that the arithmetic would take at its peak: Pope et al.'s
        model FLOPS utilization, each op against the peak of its own unit.
        """
        return self.phase.arithmetic_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class Context:
    """What becomes of decode at some context as its batch grows."""

    context: int
    crossing: int | None  # sequences from which it is bound by operations; None: never
    limit: float  # operations a byte that it nears: those of a sequence more


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device. ``decode`` is in order of context, then batch."""

    subject: Subject
    stored: StoredWeights
    layout: KvLayout
    device: Device
    rates: Rates  # the roof
    expected: Rates  # what predictions take
    roofs: tuple[Roof, ...]  # of the units that multiply matrices, the highest first
    decode: tuple[Point, ...]
    prefill: tuple[Point, ...]
    contexts: tuple[Context, ...]


def roofline(
    subject: Subject,
    stored: StoredWeights,
    device: Device,
    *,
    layout: KvLayout,
    contexts: Sequence[int],
    prompts: Sequence[int],
    sequences: Sequence[int],
    chunk: int | None = None,
    quantized: Arithmetic | None = None,
    expected: Rates | None = None,
) -> Roofline:
    """Decode at each of ``contexts`` (tokens in the cache of each sequence) and batches of
    ``sequences``, and the prefill of a prompt alone of each of ``prompts`` tokens, ``chunk`` of
    them a step (None: all at once). ``quantized`` multiplies quantized weights (None: as engines do
    on the device); ``expected`` are the rates of predictions (None: the device's).
    """
    model = cost_model(subject, stored, layout, device, quantized)
    rates = device.rates(stored.bytes)
    # The last token of a full context has one fewer in the cache.
    last = subject.program.config.context_length - 1
    expected = expected or device.predicted(stored.bytes, len(subject.program.ops))

    def point(batches: list[Batch], count: int, context: int, held: int) -> Point:
        predicted, least = (
            sum(model.seconds(batch, each) for batch in batches) for each in (expected, rates)
        )
        whole = stored.bytes + count * peak_blocks(layout, held) * layout.block_bytes
        memory = device.usable_bytes(GPU.memory_utilization)
        fits = None if memory is None else whole <= memory
        return Point(count, context, phase(model, batches, rates), predicted, least, whole, fits)

    decode = tuple(
        point([decode_batch(count, min(context, last))], count, context, min(context, last) + 1)
        for context in contexts
        for count in sequences
    )
    prefill = tuple(
        point(chunked(prompt, chunk or prompt), 1, prompt, prompt) for prompt in prompts
    )
    used = {
        part.arithmetic
        for each in decode + prefill
        for part in each.phase.parts
        if part.ops and part.name != "rest"
    }
    roofs = [Roof(unit, rates.peak(unit), rates.peak(unit) / rates.bytes_per_second)
             for unit in used]  # fmt: skip
    return Roofline(
        subject,
        stored,
        layout,
        device,
        rates,
        expected,
        tuple(sorted(roofs, key=lambda roof: (-roof.ops_per_second, roof.arithmetic))),
        decode,
        prefill,
        tuple(
            Context(context, crossing(model, at, rates), _limit(model, at, rates))
            for context in contexts
            for at in (min(context, last),)
        ),
    )


def _limit(model: CostModel, context: int, rates: Rates) -> float:
    """Operations a byte of the sequences that a very large batch gains."""
    few, many = (
        phase(model, [decode_batch(count, context)], rates)
        for count in (MOST_SEQUENCES // 2, MOST_SEQUENCES)
    )
    return (many.ops - few.ops) / (many.bytes - few.bytes)


def per_million(price: float, tokens_per_second: float) -> float:
    """The cost of a million tokens on a device of ``price`` an hour that is never idle."""
    return price / 3600 / tokens_per_second * 1e6


def levels(roofs: tuple[Roof, ...]) -> list[tuple[str, Roof]]:
    """Roofs of one height together, with their names."""
    return [
        (", ".join(roof.arithmetic for roof in alike), alike[0])
        for _, group in groupby(roofs, lambda roof: roof.ops_per_second)
        for alike in [list(group)]
    ]
