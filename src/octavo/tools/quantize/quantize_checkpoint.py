"""From a checkpoint to a quantized one: places are checked, work is resumed, files appear whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Checkpoint
from octavo.loader.pull import QUANTIZING
from octavo.machine.memory import as_size
from octavo.tools.quantize.folder import FolderTarget
from octavo.tools.quantize.forecast import sizes
from octavo.tools.quantize.gguf_copy import copied
from octavo.tools.quantize.gguf_model import modelled
from octavo.tools.quantize.gguf_writer import GgufTarget
from octavo.tools.quantize.gptq_rounding import Order
from octavo.tools.quantize.hf_model import modules, routers
from octavo.tools.quantize.layouts import Format, layout_of
from octavo.tools.quantize.quantizer import SEEN, Method, Progress, Quantizer, Recipe
from octavo.tools.quantize.scope import EMBEDDING
from octavo.tools.quantize.state import STATE, QuantizeError, State
from octavo.tools.quantize.value_heads import in_gguf_order

WORK = QUANTIZING
_EMBEDDING = (
    "the embedding is quantized: Octavo reads it, and vLLM from 0.29 on in models that have a head "
    "of their own; transformers 5.24 does not"
)


class QuantizationResult(NamedTuple):
    path: Path
    parameters: int
    nbytes: int  # of all tensors
    source_nbytes: int
    starved: int  # experts that saw too little of the calibration text
    notes: tuple[str, ...]  # what is not as one might think

    @property
    def bytes_per_weight(self) -> float:
        return self.nbytes / self.parameters


def quantize(
    checkpoint: Checkpoint,
    recipe: Recipe,
    format: Format,
    out: Path,
    samples: npt.NDArray[np.int32] | None,
    progress: Progress,
) -> QuantizationResult:
    """Writes ``out``, a folder or a GGUF file, from the layer on that an earlier run reached.

    Raises `QuantizeError`, or `OSError` where there is no writing; the finished layers stay for the
    next run.
    """
    target: FolderTarget | GgufTarget
    notes: list[str] = []
    ordered = recipe.method is not Method.GPTQ or recipe.order is not Order.GROUP
    if format is Format.GGUF:
        if not ordered:
            raise QuantizeError("GGUF has no groups in another order (--act-order group)")
        if checkpoint.path.is_dir():
            checkpoint = in_gguf_order(checkpoint)
            content, notes = modelled(checkpoint, recipe)
        else:
            content = copied(checkpoint, recipe)
        target = GgufTarget(content)
    else:
        try:
            layout = layout_of(
                format,
                recipe.scheme,
                ordered=ordered,
                damping=recipe.damping,
                kept=routers(checkpoint.config),
                ends=modules(recipe.ends),
            )
        except ValueError as error:
            raise QuantizeError(str(error)) from None
        target = FolderTarget(checkpoint, recipe, layout)
        if EMBEDDING in recipe.ends:
            notes.append(_EMBEDDING)
    quantizer = Quantizer(checkpoint, recipe, samples, target.stored)
    _check_apart(checkpoint, out)
    work = _work_folder(out, format)
    if work.is_symlink():
        raise QuantizeError(f"{work}: is a symbolic link; remove it")
    _check_room(checkpoint, recipe, format, work)
    settings = quantizer.settings() | {"format": format.value}
    with _state(work, settings, recipe) as state:
        quantizer.run(state, progress)
        nbytes = target.write(state, out)
        state.remove()
    starved = sum(quantizer.starved)
    if starved:
        notes.append(_starved(quantizer, starved))
    weights = checkpoint.weights.values()
    return QuantizationResult(
        out,
        sum(prod(weight.shape) for weight in weights),
        nbytes,
        sum(weight.stored.nbytes for weight in weights),
        starved,
        tuple(notes),
    )


def _starved(quantizer: Quantizer, count: int) -> str:
    experts = quantizer.config.experts
    assert experts is not None
    sparse = sum(layer.experts is not None for layer in quantizer.config.layers)
    layers = sum(each > 0 for each in quantizer.starved)
    return (
        f"{count} of {sparse * experts.count} experts, in {layers} layers, saw fewer rows of the "
        f"calibration text than {SEEN:g} of their inputs: their gate and up are quantized for the "
        "rows of all, down is rounded to nearest; a longer text (--num-samples) shows them more"
    )


@contextmanager
def _state(work: Path, settings: dict[str, object], recipe: Recipe) -> Iterator[State]:
    fresh, own = not work.exists(), not work.parent.exists()
    state = State(work, settings, recipe.scheme)
    try:
        yield state
    finally:
        if not state.closed:
            empty = state.finished() == 0
            state.close()
            if fresh and empty:  # nothing that a later run could use
                shutil.rmtree(work, ignore_errors=True)
                if own and not any(work.parent.iterdir()):
                    work.parent.rmdir()


def _check_apart(checkpoint: Checkpoint, out: Path) -> None:
    source = checkpoint.path.resolve()
    if source.is_dir() and out.resolve().is_relative_to(source):
        raise QuantizeError(f"{out}: lies in the source folder {checkpoint.path}; choose another")


def _work_folder(out: Path, format: Format) -> Path:
    """Raises `QuantizeError` if ``out`` is something that was not begun here."""
    if format is Format.GGUF:
        if out.exists():
            raise QuantizeError(f"{out}: exists already; choose another name or remove it")
        if not out.parent.is_dir():
            raise QuantizeError(f"{out.parent}: is no folder")
        return out.with_name(out.name + WORK)
    if out.exists() and not out.is_dir():
        raise QuantizeError(f"{out}: exists and is no folder")
    work = out / WORK
    others = out.exists() and any(path.name != WORK for path in out.iterdir())
    if others and not (work / STATE).exists():
        raise QuantizeError(
            f"{out}: exists and holds no interrupted run; choose another name or remove it"
        )
    return work


def _check_room(checkpoint: Checkpoint, recipe: Recipe, format: Format, work: Path) -> None:
    """A disk that is full after an hour is better known before."""
    size = sum(sizes(checkpoint, recipe, format).values())
    for role, weight in checkpoint.weights.items():
        if role.startswith("layers.") and len(weight.shape) == 2:
            # In the work folder, too: codes, with scale and zero in fp32.
            count, group = prod(weight.shape), recipe.scheme.size(weight.shape[1])
            size += count * recipe.scheme.bits // 8 + 8 * count // group
    place = next(path for path in (work, *work.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < size:
        raise QuantizeError(
            f"{place}: {as_size(free)} are free, and about {as_size(size)} are needed"
        )
