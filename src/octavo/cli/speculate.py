"""octavo speculate: an answer pass by pass, with its drafts accepted, replaced and discarded."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text
from octavo.cli.options import (
    ENGINE_OPTIONS,
    Model,
    engine_config,
    naming_flags,
    sampling_options,
    sampling_params,
    takes,
    words,
)
from octavo.words import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text

    from octavo.engine.config import EngineConfig
    from octavo.sampling.params import SamplingParams
    from octavo.tools.verify.passes import Pass

EXAMPLES = (
    'octavo speculate smollm2 "The days of the week, twice: Monday, Tuesday," --max-tokens 40',
    'octavo speculate smollm2 --chat "Why is the sky blue?" --no-step --speculative-config '
    """'{"method": "ngram", "num_speculative_tokens": 3}'""",
    """octavo speculate smollm2 "One, two, three" --temperature 0.8 --seed 1 --json""",
)

_DEFAULT = {"method": "suffix", "num_speculative_tokens": 4}
_ENGINE_OPTIONS = [option for option in ENGINE_OPTIONS if option.name != "max_num_seqs"]
_STYLES = {"accepted": "green", "replaced": "red strike", "discarded": "bright_black strike"}


@takes(
    params=(
        sampling_options(max_tokens=64, max_tokens_help="64", temperature=0.0),
        sampling_params,
    ),
    engine=(_ENGINE_OPTIONS, engine_config),
)
def command(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(help="The text to continue.", metavar="PROMPT", parser=words)
    ],
    params: SamplingParams,
    engine: EngineConfig,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take the prompt as a chat message to answer.")
    ] = False,
    step: Annotated[
        bool | None,
        typer.Option(
            "--step/--no-step",
            help="Wait for a key after each pass.",
            show_default="on a terminal",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the passes as one JSON object.")
    ] = False,
) -> None:
    """Show speculation at work, pass by pass.

    Each pass's draft, and what the model made of it: p is the model's probability of a guess, q the
    drafter's. The answer is first drawn without drafts, to measure what they save. Without
    --speculative-config, suffix drafts 4 tokens.
    """
    from octavo.cli.models import checkpoint
    from octavo.engine.load import load_engine
    from octavo.llm import LLM
    from octavo.tools.verify.passes import Stepping, summary

    if as_json and step:
        raise typer.BadParameter("--json prints all passes at once", param_hint="--step")
    if engine.speculative_config is None:
        with naming_flags():
            engine = replace(engine, speculative_config=_DEFAULT)
    with LLM(load_engine(checkpoint(model, chat=chat), replace(engine, max_num_seqs=1))) as llm:
        tokenizer = llm.loaded.checkpoint.tokenizer
        if chat:
            _, ids = llm.chat_prompt([{"role": "user", "content": prompt}])
        else:
            ids = tokenizer.encode(prompt)
        if params.seed is None:
            params = replace(params, seed=0)
        stepping = Stepping(llm.loaded)
        plain = stepping.plain(ids, params)
        name = tokenizer.token_text
        if as_json:
            *_, found = stepping.guessed(ids, params)
            result = {
                "text": tokenizer.decode(found.token_ids),
                "token_ids": found.token_ids,
                "passes": [each.as_dict() for each in found.passes],
                "summary": summary(plain, found),
            }
            typer.echo(json_text(result, ensure_ascii=False))
            return

        from rich.console import Console

        console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        waiting = step if step is not None else sys.stdin.isatty() and sys.stdout.isatty()
        speculation = llm.loaded.config.speculation
        assert speculation is not None
        console.print(speculation.describe(), style="bold")
        shown = 0
        for found in stepping.guessed(ids, params):
            for each in found.passes[shown:]:
                shown += 1
                _show(console, shown, each, name)
                if waiting:
                    answer = _asked(console)
                    if answer == "q":
                        return
                    waiting = answer != "a"
        console.rule("the answer")
        console.print(tokenizer.decode(found.token_ids), markup=False)
        console.rule("in all")
        for line in as_text(summary(plain, found)):
            console.print(line, markup=False)


def _asked(console: Console) -> str:
    """ "" for the next pass, "a" for all others, "q" to leave: a key of a terminal, else a line."""
    from rich.control import Control
    from rich.segment import ControlType

    from octavo.tools.top.keys import key_by_key

    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip().lower()[:1] if line else "q"
    console.print("[dim]any key: the next, a: all, q: quit[/dim]", end="")
    try:
        with key_by_key() as keys:
            key = os.read(keys, 64).decode(errors="replace").lower()[:1]
    except KeyboardInterrupt:
        key = "q"
    console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 0)))
    return key if key not in ("", "\x04") else "q"


def _show(console: Console, number: int, each: Pass, name: Callable[[int], str]) -> None:
    """A pass: a line of what happened, and a column a guess."""
    from rich.text import Text

    milliseconds = f"{1e3 * each.seconds:.1f} ms"
    if each.drafting > 0:
        milliseconds += f", of them {1e3 * each.drafting:.2f} drafting"
    head = Text(f"pass {number}", style="bold")
    guessed = f"{each.accepted} of {len(each.draft)} accepted" if each.draft else "no draft"
    head.append(f"  {guessed}, {plural(each.rows, 'row')}, {milliseconds}", style="not bold")
    console.print(head)
    columns = [
        (_quoted(name(guess.token_id)), f"q {guess.q:.2f}", f"p {guess.p:.2f}", guess.fate.value)
        for guess in each.draft
    ]
    widths = [max(map(len, column)) for column in columns]
    for row in range(4 if columns else 0):
        line = Text("    ")
        for column, width in zip(columns, widths, strict=True):
            style = _STYLES[column[3]] if row in (0, 3) else ""
            if row == 3:
                style = style.removesuffix(" strike")
            line.append(column[row], style=style)
            line.append(" " * (width + 2 - len(column[row])))
        line.rstrip()
        console.print(line)
    for guesses in each.alternatives:
        console.print(Text("    also guessed " + " ".join(_quoted(name(t)) for t in guesses)))
    console.print(_outcome(each, name))


def _outcome(each: Pass, name: Callable[[int], str]) -> Text:
    from rich.text import Text

    line = Text("    → ")
    for at, token in enumerate(each.run):
        own = at == len(each.run) - 1 and each.accepted < len(each.run)
        line.append(_quoted(name(token)), style="yellow" if own else "green")
        line.append(" ")
    if each.own_p is not None:
        what = "in its place" if len(each.run) <= len(each.draft) else "its own"
        line.append(f"({what}, p {each.own_p:.2f})", style="bright_black")
    return line


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_text(found: dict[str, Any]) -> list[str]:
    """The summary for people."""
    rates = ", ".join(f"{rate:.0%}" for rate in found["acceptance_per_position"])
    rate = found["acceptance_rate"]
    lines = [
        f"{found['tokens']} tokens in {found['passes']} passes: "
        f"{found['tokens_per_pass']:.2f} tokens per pass",
        f"{found['proposed']} tokens proposed, {found['accepted']} accepted"
        + ("" if rate is None else f" ({rate:.0%}; by position, of those tried: {rates})"),
    ]
    if "time_saved_seconds" in found:
        ms = {name: 1e3 * value for name, value in found.items() if name.endswith("seconds")}
        lines += [
            f"without drafts {1e3 * found['plain_seconds_per_token']:.2f} ms a token; with them "
            f"{ms['seconds'] / found['tokens']:.2f}",
            f"time saved {ms['time_saved_seconds']:.0f} ms = {found['passes_saved']} passes saved, "
            f"{ms['saved_by_passes_seconds']:.0f} ms, less {ms['extra_rows_seconds']:.0f} ms for "
            f"more rows a pass and {ms['drafting_seconds']:.1f} ms of drafting",
            f"speed-up: in theory {found['theoretical_speed_up']:.2f} × = "
            f"{found['tokens_per_pass']:.2f} tokens per pass ÷ "
            f"{found['relative_cost_of_a_pass']:.2f}, the cost of a pass beside one without "
            f"drafts; measured {found['measured_speed_up']:.2f} ×",
        ]
    lines.append(
        "the output is the same as without drafts"
        if found["same_output"]
        else "the output is another than without drafts: rejection keeps its distribution only"
    )
    return lines
