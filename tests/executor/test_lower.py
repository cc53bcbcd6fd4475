"""Lowering: which ops run together, and that no two live values share memory."""

from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations
from typing import Any

import pytest

from executor import tiny
from executor.driving import Driver
from octavo import _native
from octavo.executor.native import lower
from octavo.loader.base import WeightFormat
from octavo.models import families, recurrence
from octavo.models import program as model
from octavo.models.config import Activation, ModelConfig
from octavo.models.program import Op, RowOp


class Formats:
    """Three kinds of prepared activations, as the real kernels have."""

    def activation_bytes(self, format: int, k: int) -> int:
        return k * 4

    def same_activations(self, a: int, b: int) -> bool:
        wide = {WeightFormat.Q4_K, WeightFormat.Q5_K, WeightFormat.Q6_K}
        return a == b or {WeightFormat(a), WeightFormat(b)} <= wide

    def slots_row_bytes(self, experts: int, chosen: int, slot_bytes: int) -> int:
        return chosen * slot_bytes


def plan(config: ModelConfig, formats: dict[str, WeightFormat] | None = None) -> lower.Plan:
    program = families.program(config)
    every = dict.fromkeys(program.weights, WeightFormat.Q4_0)
    return lower.lower(program, every | (formats or {}), Formats())


def steps(region: lower.Region, kind: type) -> list[tuple[Any, ...]]:
    """The arguments of the row-wise steps of a kind."""
    return [step.args for step in region.work.args[-1] if step.kind is kind]


def test_a_llama_layer_is_ten_regions() -> None:
    regions = plan(tiny.config()).regions
    assert [region.name for region in regions[:10]] == [
        "embed norm prepare",
        "attn_q+attn_k+attn_v",
        "angles rope",
        "attention",
        "prepare",
        "attn_output",
        "norm prepare",
        "ffn_gate+ffn_up",
        "gate prepare",
        "ffn_down",
    ]
    assert len(regions) == 3 * 10 + 2  # the last norm, and the logits


def test_norms_between_a_linear_layer_and_the_residual() -> None:
    regions = plan(tiny.config("gemma3")).regions
    assert [region.name for region in regions[2:7]] == [
        "norm norm angles rope",
        "attention (window)",
        "prepare",
        "attn_output",
        "norm add norm prepare",
    ]


def test_the_residual_is_accumulated_in_place() -> None:
    regions = plan(tiny.config()).regions
    _, residual, _ = steps(regions[0], _native.EmbedStep)[0]
    accumulating = [
        region.work.args[0]
        for region in regions
        if region.work.kind is _native.LinearRegion and region.work.args[1]
    ]
    assert len(accumulating) == 6
    assert all(parts[0].args[2] is residual for parts in accumulating[:4])


def test_only_matrices_of_one_order_share_activations() -> None:
    def prepared(*orders: int) -> list[int]:
        program = families.program(tiny.config())
        formats = dict.fromkeys(program.weights, WeightFormat.I4)
        roles = [f"layers.0.attn_{name}" for name in "qkv"]
        numbers = {role: n for role, n in zip(roles, orders, strict=True) if n >= 0}
        first = lower.lower(program, formats, Formats(), numbers).regions[0]
        return [order for *_, order in steps(first, _native.PrepareStep)]

    assert prepared(-1, -1, -1) == [-1]
    assert prepared(0, 0, 0) == [0]
    assert prepared(0, 0, 1) == [0, 1]
    assert prepared(-1, 0, -1) == [-1, 0]


def test_formats_that_share_activations_prepare_once() -> None:
    def prepared(format: WeightFormat) -> int:
        formats = {"layers.0.attn_q": WeightFormat.Q4_K, "layers.0.attn_k": WeightFormat.Q4_K}
        first = plan(tiny.config(), formats | {"layers.0.attn_v": format}).regions[0]
        return len(steps(first, _native.PrepareStep))

    assert prepared(WeightFormat.Q6_K) == 1
    assert prepared(WeightFormat.Q8_0) == 2


def test_after_the_last_attention_only_wanted_rows_run() -> None:
    regions = plan(tiny.config()).regions
    last = max(i for i, r in enumerate(regions) if r.work.kind is _native.AttentionRegion)
    assert [region.selected for region in regions] == [i > last for i in range(len(regions))]
    assert len(steps(regions[last + 1], _native.GatherStep)) == 2


def used(of: Any) -> list[lower.Buffer]:
    """The buffers anywhere in a step."""
    match of:
        case lower.Buffer():
            return [of]
        case tuple() | list():
            return [buffer for part in of for buffer in used(part)]
    return []


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_live_values_never_overlap(family: str) -> None:
    """Between a buffer's first and last use, nobody else's bytes are in its place.

    In the arena of all rows, "between" is widened to the stretches of regions at either end, in
    which threads are not at the same place. A local buffer is used in one stretch only.
    """
    result = plan(tiny.config(family))
    spans: dict[int, tuple[lower.Buffer, list[int]]] = {}
    for index, region in enumerate(result.regions):
        for buffer in used(region.work):
            spans.setdefault(id(buffer), (buffer, []))[1].append(index)

    def meeting(index: int) -> bool:
        """Whether all threads meet before this region."""
        here, before = result.regions[index], result.regions[index - 1]
        alone = {_native.AttentionRegion, _native.LogitsRegion}
        return bool(alone & {here.work.kind, before.work.kind}) or here.selected != before.selected

    def stretch(index: int) -> tuple[int, int]:
        first, last = index, index + 1
        while first > 0 and not meeting(first):
            first -= 1
        while last < len(result.regions) and not meeting(last):
            last += 1
        return first, last - 1

    def lifetime(buffer: lower.Buffer, uses: list[int]) -> tuple[int, int]:
        if buffer.local:
            assert stretch(uses[0]) == stretch(uses[-1])
            return uses[0], uses[-1]
        return stretch(uses[0])[0], stretch(uses[-1])[1]

    for (a, a_uses), (b, b_uses) in combinations(spans.values(), 2):
        (a_first, a_last), (b_first, b_last) = lifetime(a, a_uses), lifetime(b, b_uses)
        if a.local == b.local and max(a_first, b_first) <= min(a_last, b_last):
            assert a.offset + a.row_bytes <= b.offset or b.offset + b.row_bytes <= a.offset
    totals = {True: 0, False: 0}
    for buffer, uses in spans.values():
        assert buffer.first <= uses[0]
        assert uses[-1] <= buffer.last
        assert buffer.offset % lower.ALIGNMENT == 0
        arena = result.local_row_bytes if buffer.local else result.row_bytes
        assert buffer.offset + buffer.row_bytes <= arena
        totals[buffer.local] += buffer.row_bytes
    assert result.local_row_bytes < totals[True] / 4
    assert result.row_bytes < totals[False] / 2


def test_every_op_is_lowered() -> None:
    """One that is not computed row by row by a kernel of its name has a way of its own."""

    known = [*vars(model).values(), *vars(recurrence).values()]
    ops = {kind for kind in known if is_dataclass(kind) and issubclass(kind, Op)}
    by_row = {kind for kind in ops if issubclass(kind, RowOp)}
    assert len(by_row) >= 4
    assert set(lower.LOWERINGS) == ops - by_row
    for kind in ops:
        assert not kind.__abstractmethods__
        assert {*kind.READS, *kind.WRITES} <= {field.name for field in fields(kind)}


@dataclass(frozen=True, slots=True)
class Unknown(model.Activate):
    """An op of rows without a kernel."""

    def row_function(self) -> model.RowFunction:
        return model.RowFunction("unknown")


def test_an_op_of_rows_needs_its_kernel() -> None:
    executor = Driver(tiny.checkpoint(tiny.config())).executor
    compute = executor.costs.program
    head = compute.ops[-1]
    assert isinstance(head, model.Logits)
    ops = model.Input("x"), Unknown("x", "x", Activation.SILU), head
    weights = {head.weight: compute.weights[head.weight]}
    with pytest.raises(ValueError, match="'unknown' of 1 rows, 0 weights and 0 numbers"):
        executor.add_program(model.Program(compute.config, ops, compute.widths, weights))


def test_a_value_that_nobody_wrote_is_refused() -> None:
    program = families.program(tiny.config())
    cut = type(program)(program.config, program.ops[1:], program.widths, program.weights)
    with pytest.raises(ValueError, match="reads x before anything writes it"):
        lower.lower(cut, {}, Formats())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_op_is_in_one_region(family: str) -> None:
    config = tiny.config(family)
    ops = [op for region in plan(config).regions for op in region.ops]
    assert ops == list(range(len(families.program(config).ops)))
