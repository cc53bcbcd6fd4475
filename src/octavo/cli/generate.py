"""octavo generate: complete prompts, streamed as text or as JSON lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text
from octavo.cli.options import (
    ENGINE_OPTIONS,
    Model,
    engine_config,
    option,
    sampling_options,
    sampling_params,
    takes,
    words,
)

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.engine.outputs import Delta
    from octavo.llm import LLM, Prompt, RequestOutput
    from octavo.sampling.params import SamplingParams

EXAMPLES = (
    'octavo generate smollm2 "The capital of France is" --temperature 0 --max-tokens 8 --json',
    'octavo generate smollm2 --chat "Why is the sky blue?"',
    "octavo generate gemma3-270m - < prompt.txt",
)

_SAMPLING_OPTIONS = [
    option("n", int, 1, "Answers per prompt.", "Sampling", "--n", "-n"),
    *sampling_options(max_tokens=256, max_tokens_help="256"),
    option(
        "logprobs", int | None, None, "Report this many alternatives per token (with --json).",
        "Sampling",
    ),
    option(
        "prompt_logprobs", int | None, None, "The same for the tokens of the prompt (with --json).",
        "Sampling",
    ),
]  # fmt: skip


@takes(
    params=(_SAMPLING_OPTIONS, sampling_params),
    engine=(ENGINE_OPTIONS, engine_config),
)
def command(
    model: Model,
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="Texts to continue; - reads one from standard input.",
            metavar="PROMPT",
            parser=words,
        ),
    ],
    params: SamplingParams,
    engine: EngineConfig,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each prompt as a chat message to answer.")
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            help="System message, with --chat.", show_default=False, metavar="TEXT", parser=words
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per prompt.")
    ] = False,
) -> None:
    """Complete prompts.

    All run in one batch; their texts are streamed in order.
    """
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not as_json:
            raise typer.BadParameter(f"--{name.replace('_', '-')} needs --json")
    if params.n > engine.max_num_seqs:
        raise typer.BadParameter(f"-n {params.n} is more than --max-num-seqs {engine.max_num_seqs}")
    if prompts.count("-") > 1:
        raise typer.BadParameter("- can be given once")
    texts = [_standard_input() if prompt == "-" else prompt for prompt in prompts]

    from octavo.cli.models import checkpoint
    from octavo.engine.load import load_engine
    from octavo.llm import LLM

    with LLM(load_engine(checkpoint(model, chat=chat), engine)) as llm:
        inputs: list[Prompt] = list(texts)
        if chat:
            before = [{"role": "system", "content": system}] if system is not None else []
            inputs = []
            for text in texts:
                rendered, ids = llm.chat_prompt([*before, {"role": "user", "content": text}])
                inputs.append({"prompt": rendered, "prompt_token_ids": ids})
        if as_json:
            for output in llm.generate(inputs, params, use_tqdm=sys.stderr.isatty()):
                typer.echo(json_text(as_dict(output), ensure_ascii=False))
        else:
            _stream(llm, inputs, params)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8, from byte {error.start}") from None


def _stream(llm: LLM, inputs: list[Prompt], params: SamplingParams) -> None:
    """Print answers in order; those that run ahead wait until their turn."""
    from octavo.cli.endings import why_ended
    from octavo.cli.wrap import answer_writer

    keys = [(prompt, choice) for prompt in range(len(inputs)) for choice in range(params.n)]
    ahead: dict[tuple[int, int], list[str]] = {key: [] for key in keys}
    tokens = dict.fromkeys(keys, 0)
    last: dict[tuple[int, int], Delta] = {}
    turn = 0
    failed = False
    writer = answer_writer(sys.stdout)
    for prompt, delta in llm.stream(inputs, params):
        key = prompt, delta.choice
        ahead[key].append(delta.text)
        tokens[key] += len(delta.token_ids)
        if delta.finish_reason is not None:
            last[key] = delta
        if delta.record is not None and delta.record.error is not None:
            typer.echo(f"octavo: prompt {prompt + 1} failed: {delta.record.error}", err=True)
            failed = True
        while turn < len(keys):
            key = keys[turn]
            writer.feed("".join(ahead[key]))
            ahead[key].clear()
            if key not in last:
                break
            turn += 1
            writer.feed("\n")
            limit = llm.loaded.max_model_len
            if sys.stdout.isatty() and (
                why := why_ended(last[key], tokens[key], params, limit, "see --max-model-len")
            ):
                typer.echo(f"({why})", err=True)
            if turn < len(keys):
                writer.feed("---\n")
    if failed:
        raise typer.Exit(1)


def as_dict(output: RequestOutput) -> dict[str, Any]:
    """One prompt's result as `--json` prints it. With n > 1, ``choices`` has all answers."""
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        | ({} if choice.logprobs is None else {"logprobs": _positions(choice.logprobs)})
        for choice in output.outputs
    ]
    completion = sum(len(choice.token_ids) for choice in output.outputs)
    prompt = len(output.prompt_token_ids)
    result: dict[str, Any] = {name: choices[0][name] for name in choices[0] if name != "index"}
    result["usage"] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cached_tokens": output.num_cached_tokens,
    }
    if len(choices) > 1:
        result["choices"] = choices
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = _positions(output.prompt_logprobs)
    return result


def _positions(positions: Any) -> list[Any]:
    return [
        position
        and [{"token_id": token_id, **logprob._asdict()} for token_id, logprob in position.items()]
        for position in positions
    ]
