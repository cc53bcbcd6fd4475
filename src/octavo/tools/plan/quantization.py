"""What a format costs and gives: bytes, and the tokens a second that bytes and operations allow.

Decode reads every weight for each step, whatever the number of sequences, so that one sequence is
bound by bytes; prefill uses each weight for many tokens and is bound by operations. Between them
lies the batch from which decode is bound by operations, too (Williams, Waterman and Patterson,
2009; Pope et al., 2023, section 2). Everything is counted by `CostModel`, as for the engine's own
shares of a limit; here its numbers are only divided up and added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from octavo.engine.config import SettingsError
from octavo.executor.cost import Arithmetic, CostModel, Rates
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import Weight, WeightFormat
from octavo.loader.rounding import BLOCK, FLOATS, PLANNED, QUANTIZATIONS
from octavo.models.program import ExpertLinear
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.phase import Phase, crossing, decode_batch, phase, prefill_batch
from octavo.tools.plan.schemes import GGUF, PlannedFormat, StorageScheme, scheme
from octavo.tools.plan.subject import Subject, is_matrix, part


class StoredWeights(NamedTuple):
    """A model's weights in some formats: each weight's format and bytes, by role."""

    name: str
    formats: dict[str, WeightFormat | PlannedFormat]
    sizes: dict[str, int]
    scheme: StorageScheme | None  # of the layers; None: as a file has them
    groups: dict[str, int]  # of grouped formats

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def part_bytes(self, name: str) -> int:
        return sum(size for role, size in self.sizes.items() if part(role) == name)


def in_scheme(subject: Subject, scheme: StorageScheme, edges: StorageScheme) -> StoredWeights:
    """The layers' matrices in ``scheme``, embedding and head in ``edges``, vectors in F32.

    Raises `ValueError` where a matrix cannot be stored so, with its name.
    """
    formats, sizes, groups = {}, {}, {}
    for role, shape in subject.program.weights.items():
        own = scheme if part(role) == "layers" else edges
        if not is_matrix(shape):
            own = GGUF[WeightFormat.F32]
        try:
            outputs, inputs = prod(shape[-2:-1]), shape[-1]  # of each matrix of a stack
            sizes[role] = prod(shape[:-2]) * own.matrix_bytes(outputs, inputs)
        except ValueError as error:
            raise ValueError(f"{error} ({role})") from None
        formats[role] = own.format
        groups[role] = (own.group or shape[-1]) if own.format.grouped else 0
    return StoredWeights(scheme.name, formats, sizes, scheme, groups)


def as_stored(subject: Subject) -> StoredWeights | None:
    """The weights as the file has them, not as they are read; vectors in F32 as everywhere here."""
    if subject.stored is None:
        return None
    weights = {role: subject.stored[role] for role in subject.program.weights}
    return StoredWeights(
        "as stored",
        {role: weight.format for role, weight in weights.items()},
        {
            role: weight.stored.nbytes if is_matrix(weight.shape) else weight.nbytes
            for role, weight in weights.items()
        },
        None,
        {role: weight.group for role, weight in weights.items()},
    )


def as_asked(
    subject: Subject, scheme: StorageScheme | None = None, edges: StorageScheme | None = None
) -> StoredWeights:
    """The weights in ``scheme``, embedding and head in ``edges`` (None: BF16); without a scheme as
    a file has them or, where there is only a shape, in BF16.

    Raises `ValueError` where a matrix cannot be stored so, where a shape alone says that its
    weights are quantized, and for ``edges`` of weights that are taken as a file has them.
    """
    bf16 = GGUF[WeightFormat.BF16]
    if scheme is not None:
        return in_scheme(subject, scheme, edges or bf16)
    if (stored := as_stored(subject)) is not None:
        if edges is not None:
            raise ValueError(
                f"--embedding-format {edges.name} needs --format: {subject.name} is planned as its "
                "file has it"
            )
        return stored
    if subject.quantized is not None:
        raise ValueError(
            f"{subject.name}: its config.json says that weights are quantized ({subject.quantized})"
            ", but not all of how: give weights, or say it with --format (and --bits, --group-size)"
            " to a command that has it"
        )
    return in_scheme(subject, bf16, edges or bf16)


def as_rounded(subject: Subject, name: str) -> StoredWeights:
    """As ``--quantization`` int8 or int4 leaves a float checkpoint (loader/rounding.py), its
    scales in 16 bits; fp8 as GPUs' engines do, the layers only. Raises `ValueError` for weights
    that are quantized already.
    """
    before = as_asked(subject)
    for role, shape in subject.program.weights.items():
        if is_matrix(shape) and before.formats[role] not in FLOATS:
            raise ValueError(
                f"{name} is for float weights, and {role} is {before.formats[role].name}"
            )
    if name in PLANNED:
        return in_scheme(subject, scheme(name), GGUF[WeightFormat.BF16])._replace(
            name=f"{name}, rounded"
        )
    layers, heads = QUANTIZATIONS[name]
    formats, sizes, groups = dict(before.formats), dict(before.sizes), dict(before.groups)
    for role, shape in subject.program.weights.items():
        if not is_matrix(shape):
            continue
        rows, columns = prod(shape[:-1]), shape[-1]
        if columns % BLOCK or role.endswith("ffn_gate_inp"):
            continue
        rounding = layers if part(role) == "layers" else heads
        bits = 8 if rounding.format is WeightFormat.I8 else 4
        group = min(rounding.group, columns)
        of_group = 16 if rounding.symmetric else 16 + bits  # a scale, and a zero
        formats[role], groups[role] = rounding.format, group
        sizes[role] = -(-rows * (columns * bits + -(-columns // group) * of_group) // 8)
    return StoredWeights(f"{name}, rounded", formats, sizes, None, groups)


def for_gpus(stored: StoredWeights) -> bool:
    """Whether there are weights in it that only GPUs' engines hold."""
    return any(isinstance(format, PlannedFormat) for format in stored.formats.values())


def held(subject: Subject, stored: StoredWeights, isa: str | None = None) -> dict[str, int] | None:
    """Bytes of the engine's own packed copies, by role; None when it cannot hold such a format or
    does not compute such a model.
    Raises `SettingsError` for an ``OCTAVO_ISA`` that is not here.
    """
    from octavo.executor.native.packing import held_bytes, scaled_bytes, tier_name

    try:
        tier = tier_name(isa)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if not subject.served:
        return None
    nothing, scaled = np.empty(0, np.uint8), scaled_bytes(subject.program)
    sizes = {}
    try:
        for role, shape in subject.program.weights.items():
            format = stored.formats[role]
            if isinstance(format, PlannedFormat):
                return None
            weight = Weight(role, format, shape, nothing, group=stored.groups[role])
            sizes[role] = held_bytes(weight, tier) if is_matrix(shape) else 4 * prod(shape)
            sizes[role] += scaled.get(role, 0)
    except ValueError:
        return None
    return sizes


# --- speed ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """A model in some format on a machine."""

    stored: StoredWeights
    bytes_per_weight: float  # over the layers' matrices
    rates: Rates
    decode: Phase  # one sequence
    prefill: Phase
    # Sequences from which the layers' matrices are bound by operations; None where some are
    # experts', each of which sees some of the tokens only.
    layers_crossing: float | None
    crossing: int | None  # the same for all of a step; None: never
    held_bytes: int | None
    held_bytes_per_weight: float | None
    held_decode_tokens_per_second: float | None  # of what the engine's own copy takes


def arithmetic(
    stored: StoredWeights, device: Device, quantized: Arithmetic | None = None
) -> dict[str, Arithmetic]:
    """What multiplies each matrix on a device. ``quantized`` multiplies all that is not a float
    format; None: as engines do there. This engine's kernels round activations to 8 bits beside
    quantized weights. GPUs' widen weights of few bits to 16 (W4A16, W8A16), but for the schemes
    whose activations have 8 bits, too (`StorageScheme.narrow`): fp8 where there are units for it.
    """
    narrow = stored.scheme is not None and stored.scheme.narrow
    usual = Arithmetic.INT8 if narrow or not device.gpu else Arithmetic.BF16
    units: dict[WeightFormat | PlannedFormat, Arithmetic] = {
        WeightFormat.F32: Arithmetic.FP32,
        WeightFormat.F16: device.half,
        WeightFormat.BF16: Arithmetic.BF16,
        PlannedFormat.FP8: quantized or (Arithmetic.FP8 if device.has_fp8 else Arithmetic.BF16),
    }
    units[WeightFormat.E4M3] = units[PlannedFormat.FP8] if device.gpu else Arithmetic.FP32
    return {role: units.get(format, quantized or usual) for role, format in stored.formats.items()}


def cost_model(
    subject: Subject,
    stored: StoredWeights,
    layout: KvLayout,
    device: Device,
    quantized: Arithmetic | None = None,
) -> CostModel:
    """What counts for a model in these formats on a device; ``quantized`` as of `arithmetic`."""
    return CostModel(
        subject.program,
        layout,
        weight_bytes=stored.sizes,
        arithmetic=arithmetic(stored, device, quantized),
        attention=device.attention(layout.dtype, quantized),
    )


def plan(
    subject: Subject,
    stored: StoredWeights,
    device: Device,
    *,
    layout: KvLayout | None = None,
    context: int,
    prompt: int,
    quantized: Arithmetic | None = None,
    isa: str | None = None,
) -> QuantizationPlan:
    """``context``: tokens in the cache of each sequence that decodes; ``prompt``: tokens read at
    once in prefill; ``quantized``: as of `arithmetic`; ``layout``: of the cache (None: in bf16).
    """
    layout = layout or KvLayout.of(subject.program.config)
    context = min(context, subject.program.config.context_length - 1)  # the last has one fewer
    units = arithmetic(stored, device, quantized)
    model = cost_model(subject, stored, layout, device, quantized)
    rates = device.rates(stored.bytes)
    matrices = subject.matrices()
    weights = sum(map(prod, matrices.values()))
    per_weight = sum(stored.sizes[role] for role in matrices) / weights
    own = held(subject, stored, isa)
    held_per_weight, held_rate = None, None
    if own is not None:
        held_per_weight = sum(own[role] for role in matrices) / weights
        own_rates = device.rates(sum(own.values()))
        repacked = stored._replace(sizes=own)
        packed = cost_model(subject, repacked, layout, device, quantized)
        held_rate = phase(packed, [decode_batch(1, context)], own_rates).tokens_per_second
    layers_crossing = None
    if not any(isinstance(op, ExpertLinear) for op in subject.program.ops):
        # A step's reading against one token's arithmetic, whose units may differ in a file.
        seconds = sum(2 * prod(matrices[role]) / rates.peak(units[role]) for role in matrices)
        layers_crossing = per_weight * weights / rates.bytes_per_second / seconds
    return QuantizationPlan(
        stored,
        per_weight,
        rates,
        phase(model, [decode_batch(1, context)], rates),
        phase(model, [prefill_batch(prompt)], rates),
        layers_crossing,
        crossing(model, context, rates),
        None if own is None else sum(own.values()),
        held_per_weight,
        held_rate,
    )
