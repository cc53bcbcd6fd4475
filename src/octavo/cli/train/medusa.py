"""octavo train medusa: heads that guess a model's next tokens, learned from its own answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.console import json_text, now_and_then, on_stderr
from octavo.cli.fold import show_report
from octavo.cli.options import Model

EXAMPLES = (
    "octavo train medusa smollm2 -o smollm2-heads",
    "octavo train medusa smollm2 --text prompts.txt --heads 4 -o smollm2-heads",
    'octavo serve smollm2 --speculative-config \'{"method":"medusa","model":"smollm2-heads"}\'',
)


def command(
    model: Model,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", file_okay=False, help="Folder to write."),
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text, each line a prompt, asked once: the more it is like what the model "
            "will be asked, the better the heads guess.",
            show_default="questions that MODEL invents, and some that Octavo brings",
        ),
    ] = None,
    measure_on: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text of more prompts, which the heads are measured on; nothing like them "
            "is learned from.",
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=2, metavar="N", help="Prompts answered, at most.")
    ] = 5000,
    invented: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="X",
            help="Without a text, the share of questions that MODEL invents.",
            show_default="0.75",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=4, metavar="N", help="Longest answer in tokens.")
    ] = 128,
    heads: Annotated[
        int, typer.Option(min=1, max=16, metavar="N", help="Tokens guessed ahead.")
    ] = 3,
    recurrent: Annotated[
        bool,
        typer.Option(
            "--recurrent/--medusa",
            help="One head that goes on from its own guess, or Medusa's, one for each token.",
        ),
    ] = True,
    width: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Of a recurrent head, a multiple of 32.", show_default="768"
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, max=8, metavar="N", help="Of each of Medusa's heads.", show_default="1"
        ),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens that are guessed: the commonest.")
    ] = 4096,
    epochs: Annotated[float, typer.Option(min=0.0, metavar="X", help="Times through.")] = 2.0,
    row_epochs: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="X",
            help="Before that, a recurrent head's of hidden rows.",
            show_default="0.5",
        ),
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Of AdamW, at its highest.")
    ] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Same seed, same heads.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Compute threads.", show_default="one per usable core"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as one JSON object.")
    ] = False,
) -> None:
    """Train heads that draft for MODEL, and write them to a folder.

    MODEL, if it was taught to chat, invents questions, and answers the prompts itself; its heads
    learn, from the hidden rows that it answered from, what it says next. One answer in 21 is kept
    to measure on. Quantized models are fine: heads are for the model as it is served.
    """
    from octavo.engine.config import SettingsError
    from octavo.tools.train.medusa_training import HeadRecipe, import_torch
    from octavo.tools.train.run import train

    import_torch()  # before minutes are spent
    own = {"layers": layers} if recurrent else {"width": width, "row_epochs": row_epochs}
    for name, value in own.items():
        if value is not None:
            kind = "--recurrent" if recurrent else "--medusa"
            flag = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{kind} makes no use of it", param_hint=flag)
    if text is not None and invented is not None:
        raise typer.BadParameter("--text says what is asked", param_hint="--invented")
    given: dict[str, Any] = {"width": width, "layers": layers, "row_epochs": row_epochs}
    recipe = HeadRecipe(
        heads=heads,
        recurrent=recurrent,
        vocabulary=vocabulary,
        epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
        **{name: value for name, value in given.items() if value is not None},
    )
    if out.exists() and any(out.iterdir()):
        raise SettingsError(f"{out}: there is something in this folder already")
    began = time.monotonic()
    with on_stderr() as show:
        facts = train(
            model,
            out,
            recipe,
            text=text,
            measure_on=measure_on,
            num_prompts=prompts,
            **({} if invented is None else {"share_invented": invented}),
            max_tokens=max_tokens,
            threads=threads,
            progress=now_and_then(show),
        )
    facts["seconds"] = round(time.monotonic() - began, 1)
    show_report(json_text(facts, indent=2) if as_json else _as_text(facts), as_json=as_json)


def _as_text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['out']}: {facts['bytes']:,} bytes, in {facts['seconds']:.0f} s",
        f"answers      {facts['answers']:,} with {facts['tokens']:,} tokens; the "
        f"{facts['vocabulary']:,} tokens guessed are {facts['vocabulary_covers']:.1%} of "
        "those kept",
    ]
    if facts["prompts_left_out"]:
        lines.append(
            f"left out     {facts['prompts_left_out']:,} prompts that the engine cannot take, the "
            f"first of them because {facts['why_left_out']}"
        )
    pairs = zip(facts["top1"], facts["top1_if_right_before"], strict=True)
    for number, (all_, behind) in enumerate(pairs, 1):
        lines.append(f"head {number}       right {all_:.1%}, behind right guesses {behind:.1%}")
    lines.append(f"drafting     {facts['tokens_per_pass']:.2f} tokens a pass expected")
    if "measured_on" in facts:
        per_pass = facts["measured_on"]["tokens_per_pass"]
        lines.append(f"measured on  other prompts, {per_pass:.2f} tokens a pass")
    return "\n".join(lines)
