"""A model quantized layer by layer on a calibration text, and resumed where it was interrupted.

All samples go through one layer at a time. GPTQ stops at every shared input of it: the inputs'
second moments are taken, the matrices that read them quantized, and what follows is computed with
the quantized ones, so that later matrices make up for earlier errors. AWQ, which makes up for
nothing, looks at the inputs that the model has as it was, as its authors do; round-to-nearest looks
at nothing. An expert's inputs are the rows that are routed to it. Held at a time: the samples'
hidden states, one layer in fp32, and what its work needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Checkpoint, CheckpointError
from octavo.loader.bind import ROUTERS
from octavo.models.families import program
from octavo.tools.quantize.awq_scaling import Stored, awq
from octavo.tools.quantize.calibrate import Moments
from octavo.tools.quantize.gptq_rounding import Order, gptq, relative_loss
from octavo.tools.quantize.grid import Float32, Quantized, Scheme
from octavo.tools.quantize.hidden_states import HiddenStates, LayerWeights, some_rows
from octavo.tools.quantize.k_quants import GgmlBlocks, k_quantize
from octavo.tools.quantize.layers import LayerOps, SharedInput, split
from octavo.tools.quantize.mixes import Mix
from octavo.tools.quantize.nearest import nearest
from octavo.tools.quantize.state import LayerResult, QuantizeError, State

VERSION = 1  # of what the settings mean: raise it when results change
INPUTS = 32  # of a quantized matrix: a multiple, for the kernels (executor/native/packing.py)
# Rows that an expert must have seen, for each input of a matrix: of fewer, its second moments are
# mostly of what it has not seen.
SEEN = 0.25
_DIGEST_BYTES = 1 << 24  # of a weight that are read at a time


class Method(Enum):
    RTN = "rtn"
    IMATRIX = "imatrix"  # each weight by itself, too; the grids go by the inputs' mean squares
    GPTQ = "gptq"
    AWQ = "awq"


LOOKING = (Method.GPTQ, Method.AWQ)  # at a text, layer by layer


@dataclass(frozen=True, slots=True)
class Recipe:
    """How matrices are rounded; where they are written is no concern of it.

    ``scheme`` is for the matrices of the layers but those that are ``kept`` or have one of their
    own in ``schemes``, ``ends`` for the embedding and the head, by role; an end that is not in it
    is not rounded. ``mix`` is the name of all these together, where they have one: grids are then
    searched block by block. ``importance``: the mean squares [in] of matrices' inputs, by role.
    """

    method: Method
    scheme: Scheme
    order: Order = Order.STATIC  # GPTQ's
    search: bool = True  # GPTQ's grids: by squared error, or from smallest to largest
    damping: float = 0.01  # GPTQ's
    ends: Mapping[str, Scheme] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    mix: Mix | None = None
    importance: Mapping[str, Float32] = field(default_factory=dict)

    def of(self, role: str, shape: tuple[int, ...]) -> Scheme | None:
        """What a weight is rounded to; None for one that stays as it is."""
        if not role.startswith("layers."):
            return self.ends.get(role)
        stays = len(shape) != 2 or role.endswith(ROUTERS) or role in self.kept
        return None if stays else self.schemes.get(role, self.scheme)


def round_each(recipe: Recipe, role: str, weights: Float32) -> Quantized | GgmlBlocks:
    """Rows of a matrix that ``recipe`` rounds, each weight by itself."""
    scheme = recipe.of(role, weights.shape)
    assert scheme is not None
    if recipe.mix is None:
        return nearest(scheme, weights)
    return k_quantize(scheme.kind.format, weights, recipe.importance.get(role))


class Report(NamedTuple):
    """What has just been done: matrices of a layer, and the share of their outputs' squares on the
    calibration text that is error (None where there is none)."""

    layer: int
    layers: int
    role: str
    loss: float | None
    last: bool = False  # of the layer, which is safe


Progress = Callable[[Report], None]


class Quantizer:
    """Quantizes a checkpoint's layers into a `State`, one after another.

    Raises `QuantizeError` for matrices that the scheme does not fit, or numbers that are none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        samples: npt.NDArray[np.int32] | None,
        stored: Stored,
    ) -> None:
        self.recipe = recipe
        self.path = checkpoint.path
        self.config = checkpoint.config
        self.samples = samples
        self.stored = stored
        self.weights = checkpoint.weights
        self.program = program(checkpoint.config)
        self.before, self.layers = split(self.program)
        self.starved: list[int] = []  # of each layer done, how many experts saw too few rows
        self._check()

    def _check(self) -> None:
        """Everything that can be known before work begins, with the tensor's name."""
        for role, shape in self.program.weights.items():
            scheme = self.recipe.of(role, shape)
            if scheme is None:
                continue
            inputs, name = shape[1], self._name(role)
            if inputs % INPUTS:
                raise QuantizeError(
                    f"{name} has {inputs} inputs, not a multiple of {INPUTS}: Octavo could "
                    "not serve it quantized"
                )
            if scheme.group is not None and inputs % scheme.group:
                raise QuantizeError(
                    f"{name} has {inputs} inputs, which group size {scheme.group} does not "
                    f"divide: choose one that does, such as {_dividing(inputs)}"
                )
        if self.recipe.method in LOOKING and self.samples is None:
            raise QuantizeError(f"{self.recipe.method.value} needs a calibration text")

    def _name(self, role: str) -> str:
        return f"{self.path}: {self.weights[role].name}"

    def settings(self) -> dict[str, Any]:
        """Everything that results depend on."""
        recipe = asdict(replace(self.recipe, schemes={}, importance={}))
        for name in ("schemes", "importance"):  # the one goes with the mix, the other is large
            del recipe[name]
        scheme = recipe.pop("scheme") | {}
        facts = {"version": VERSION, **recipe, **scheme, "model": self._digest()}
        if self.recipe.method in LOOKING and self.samples is not None:
            facts["samples"] = list(self.samples.shape)
            facts["calibration"] = hashlib.sha256(self.samples.tobytes()).hexdigest()
        if self.recipe.importance:
            found = hashlib.sha256()
            for role, squares in sorted(self.recipe.importance.items()):
                found.update(role.encode() + squares.tobytes())
            facts["importance"] = found.hexdigest()
        facts["kept"] = sorted(self.recipe.kept)
        for name in ("ends", "kept", "mix"):
            if not facts[name]:
                del facts[name]  # so that what earlier versions began can be finished
        return dict(json.loads(json.dumps(facts, default=_plain)))

    def _digest(self) -> str:
        """Return a digest of the shape, and of each weight's name, format and all bytes."""
        shape, biases = repr(self.config), self.config.biases
        if biases:  # a set's order is another one in every process
            shape = shape.replace(repr(biases), repr(sorted(biases)))
        found = hashlib.blake2b(shape.encode() + repr(self.config.layers).encode())
        for role, weight in self.weights.items():
            found.update(f"{role} {weight.format} {weight.shape}".encode())
            count = weight.shape[0]
            step = max(1, _DIGEST_BYTES * count // max(1, weight.nbytes))
            for row in range(0, count, step):
                rows = weight.rows(row, min(row + step, count))
                found.update(rows.tobytes())
        return found.hexdigest()

    def run(self, state: State, progress: Progress) -> None:
        """From the first layer that ``state`` has not."""
        first = state.finished()
        method = self.recipe.method
        if not any(self._rounded(layer.matrices) for layer in self.layers):
            method = Method.RTN  # nothing to look at a text for
        calibrated = method in LOOKING
        hidden = HiddenStates(self.program, self.layers)
        if calibrated and first < len(self.layers):
            assert self.samples is not None
            hidden.begin(self.before, self.samples, self._embedding)
        for index, layer in enumerate(self.layers):
            weights = LayerWeights(self.path, self.weights, layer)
            if index < first:
                result = state.load(index)  # a damaged one is better known now than at the end
                self.starved.append(len(result.starved))
                if hidden:
                    if method is Method.GPTQ:
                        weights.become(result)
                    hidden.follow(layer, weights)
                progress(Report(index, len(self.layers), "", None, last=True))
                continue
            work = {Method.GPTQ: self._gptq, Method.AWQ: self._awq}.get(method, self._each)
            tell = _Teller(progress, index, len(self.layers))
            with np.errstate(all="ignore"):  # what is not finite is named where it appears
                result = work(hidden, layer, weights, tell)
            state.save(index, result)
            self.starved.append(len(result.starved))
            tell.done()

    # ── Methods ─────────────────────────────────────────────────────────────────────────────────

    def _each(
        self, hidden: HiddenStates, layer: LayerOps, weights: LayerWeights, tell: _Teller
    ) -> LayerResult:
        result = LayerResult.empty()
        for role in self._rounded(layer.matrices):
            with self._naming(role):
                result.matrices[role] = round_each(self.recipe, role, weights[role])
            tell(role, None)
        return result

    def _rounded(self, roles: tuple[str, ...]) -> list[str]:
        """The matrices of a layer that are quantized."""
        return [role for role in roles if role not in self.recipe.kept]

    def _gptq(
        self, hidden: HiddenStates, layer: LayerOps, weights: LayerWeights, tell: _Teller
    ) -> LayerResult:
        result = LayerResult.empty()
        recipe = self.recipe
        for shared, moments in self._inputs(hidden, layer, weights, result):
            rounded = self._rounded(shared.roles)
            if shared.router or not rounded:
                continue
            stacked = np.concatenate([weights[role] for role in rounded])
            with self._naming(rounded[0]):
                if moments is None:
                    found = nearest(recipe.scheme, stacked)
                else:
                    found = gptq(
                        recipe.scheme,
                        stacked,
                        moments.second,
                        order=recipe.order,
                        search=recipe.search,
                        damping=recipe.damping,
                    )
            at = 0
            for role in rounded:
                rows = len(weights[role])
                matrix = result.matrices[role] = found.rows(slice(at, at + rows))
                at += rows
                became = matrix.values()
                loss = None
                if moments is not None:
                    loss = relative_loss(weights[role], became, moments.second)
                tell(role, loss)
                weights.changed[role] = became
        return result

    def _awq(
        self, hidden: HiddenStates, layer: LayerOps, weights: LayerWeights, tell: _Teller
    ) -> LayerResult:
        result = LayerResult.empty()
        inputs = self._inputs(hidden, layer, weights, result)
        own = {role: weights[role] for role in layer.weights}
        with self._naming(layer.matrices[0]):
            matrices, others = awq(self.recipe.scheme, layer, own, inputs, self.stored)
        result.matrices.update(matrices)
        result.vectors.update(others)
        for role in layer.matrices:
            tell(role, None)
        return result

    # ── Inputs ──────────────────────────────────────────────────────────────────────────────────

    def _inputs(
        self,
        hidden: HiddenStates,
        layer: LayerOps,
        weights: Mapping[str, Float32],
        result: LayerResult,
    ) -> Iterator[tuple[SharedInput, Moments | None]]:
        """Every input that matrices of the layer share, with its moments, when the samples have
        come to it; in the end they are through the layer.

        An expert to which fewer rows were routed than `SEEN` asks for is listed by ``result``.
        Its matrices that read what the router reads get the moments of all rows, the others None.
        """
        done, everyone, starved = 0, dict[str, Moments](), set[int]()
        for shared in layer.inputs:
            hidden.advance(layer, weights, done, shared.first)
            done = shared.first
            moments = self._moments(hidden, shared)
            self._finite(moments, shared.roles[0])
            if shared.router:
                everyone[shared.x] = moments
            if shared.expert is None or moments.count >= SEEN * len(moments.second):
                yield shared, moments
            else:
                starved.add(shared.expert)
                yield shared, everyone.get(shared.x)
        hidden.advance(layer, weights, done, len(layer.ops))
        result.starved.extend(sorted(starved))

    def _moments(self, hidden: HiddenStates, shared: SharedInput) -> Moments:
        moments = Moments(self.program.weights[shared.roles[0]][1])
        for x in hidden.inputs(shared, len(moments.second)):
            moments.add(x)
        return moments

    def _embedding(self, role: str, rows: npt.NDArray[np.int32]) -> Float32:
        """Some of its rows, as they will be: later matrices make up for its errors, too."""
        values = some_rows(self.weights[role], rows)
        scheme = self.recipe.of(role, values.shape)
        return values if scheme is None else nearest(scheme, values).values()

    @contextmanager
    def _naming(self, role: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise  # it says already where
        except ValueError as error:
            raise QuantizeError(f"{self._name(role)}: {error}") from None

    def _finite(self, moments: Moments, role: str) -> None:
        if not moments.finite:
            raise QuantizeError(
                f"{self._name(role)}: its inputs on the calibration text are not all finite numbers"
            )


class _Teller:
    def __init__(self, progress: Progress, layer: int, layers: int) -> None:
        self._progress = progress
        self._report = Report(layer, layers, "", None)

    def __call__(self, role: str, loss: float | None) -> None:
        self._report = self._report._replace(role=role.rpartition(".")[2], loss=loss)
        self._progress(self._report)

    def done(self) -> None:
        self._progress(self._report._replace(last=True))


def _plain(value: object) -> Any:
    """For JSON."""
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a {type(value).__name__} is no setting")


def _dividing(inputs: int) -> str:
    return " or ".join(str(size) for size in (128, 64, 32) if inputs % size == 0)
