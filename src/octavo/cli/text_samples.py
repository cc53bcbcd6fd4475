"""The text that quantizers learn from: its options, its samples, and importances of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import now_and_then, on_stderr

if TYPE_CHECKING:
    from octavo.loader.base import Checkpoint
    from octavo.tools.quantize.imatrix import ImportanceMatrix

NUM_SAMPLES, SEQ_LEN = 64, 512

Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text to look at; the more it is like what the model will read, the better.",
        show_default="the Python language reference",
    ),
]
NumSamples = Annotated[
    int | None,
    typer.Option(
        min=1, max=4096, metavar="N", help="Pieces of the text.", show_default=str(NUM_SAMPLES)
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        min=16,
        max=32768,
        metavar="TOKENS",
        help="Length of each.",
        show_default=f"{SEQ_LEN}, or the model's context",
    ),
]


def text_samples(
    checkpoint: Checkpoint, calibration: Path | None, count: int | None, asked: int | None
) -> Any:
    """Token ids [samples, tokens]."""
    from octavo.tools.quantize.calibrate import CalibrationError, default_text, samples
    from octavo.tools.quantize.text import read_text

    context = checkpoint.config.default_length
    if asked is not None and asked > context:
        raise typer.BadParameter(
            f"{asked} tokens are more than the model's context of {context}",
            param_hint="--seq-len",
        )
    length = min(SEQ_LEN, context) if asked is None else asked
    if asked is None and length < SEQ_LEN:
        print(
            f"note: the model's context is {context} tokens: the text's pieces are of {length}, "
            f"not of {SEQ_LEN}",
            file=sys.stderr,
        )
    if calibration is None:
        text, where = default_text(), "the default text"
    else:
        text, where = read_text(calibration, CalibrationError), str(calibration)
    return samples(checkpoint.tokenizer, text, count or NUM_SAMPLES, length, where)


def collected(checkpoint: Checkpoint, samples: Any, dataset: str) -> ImportanceMatrix:
    """Importances on them, with the progress on standard error."""
    from octavo.tools.quantize.imatrix import collect

    with on_stderr() as show:
        said = now_and_then(show)
        return collect(
            checkpoint,
            samples,
            dataset,
            lambda layer, layers: said(f"importances: layer {layer} of {layers}"),
        )
