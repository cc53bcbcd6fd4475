"""octavo imatrix: how much each input of a model's matrices counts, in a file for quantizers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import json_text
from octavo.cli.fold import show_report
from octavo.cli.options import Model, check_file
from octavo.cli.text_samples import Calibration, NumSamples, SeqLen, collected, text_samples

EXAMPLES = (
    "octavo imatrix smollm2 -o smollm2.imatrix.gguf",
    "octavo imatrix org/repo --calibration mine.txt --num-samples 256 -o mine.dat",
)


def command(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write: llama.cpp's GGUF form, or its older one if it ends in .dat.",
        ),
    ],
    calibration: Calibration = None,
    num_samples: NumSamples = None,
    seq_len: SeqLen = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as one JSON object.")
    ] = False,
) -> None:
    """Collect an importance matrix of a model on a text.

    It has the mean square of each input of each matrix.

    octavo quantize --mix and llama.cpp's llama-quantize round by it: inputs that are large count
    more. Each expert's are of the rows that are routed to it.
    """
    from octavo.loader import load
    from octavo.loader.pull import resolve
    from octavo.tools.quantize.imatrix import write_imatrix

    if calibration is not None and not calibration.is_file():
        raise typer.BadParameter(f"no such file: {calibration}", param_hint="--calibration")
    check_file(out, "")
    checkpoint = load(resolve(model))
    began = time.monotonic()
    samples = text_samples(checkpoint, calibration, num_samples, seq_len)
    dataset = "pydoc_data.topics" if calibration is None else str(calibration)
    matrix = collected(checkpoint, samples, dataset)
    write_imatrix(out, matrix)
    unseen = sum(int((entry.counts == 0).sum()) for entry in matrix.entries.values())
    facts = {
        "path": str(out),
        "entries": len(matrix.entries),
        "unseen_experts_matrices": unseen,
        "num_samples": matrix.chunks,
        "seq_len": matrix.chunk_size,
        "seconds": round(time.monotonic() - began, 1),
    }
    text = (
        f"{out}: {len(matrix.entries)} tensors' inputs on {matrix.chunks} pieces of "
        f"{matrix.chunk_size} tokens, in {facts['seconds']:,.0f} s"
    )
    if unseen:
        text += f"\n{unseen} of the experts' matrices saw nothing of the text"
    show_report(json_text(facts, indent=2) if as_json else text, as_json=as_json)
