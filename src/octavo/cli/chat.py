"""octavo chat: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import (
    ENGINE_OPTIONS,
    Model,
    engine_config,
    named_flags,
    sampling_options,
    sampling_params,
    takes,
    words,
)

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.llm import LLM
    from octavo.sample.params import SamplingParams

EXAMPLES = (
    "octavo chat smollm2",
    'octavo chat smollm2 --system "Answer in one sentence." --temperature 0.3 --verbose',
)

HELP = """\
/reset          forget the conversation
/system [TEXT]  set the system message (empty: none) and forget the conversation
/stats          speed and tokens of the last answer
/exit           leave (or Ctrl-D); Ctrl-C stops an answer and keeps the conversation"""


@takes(
    params=(
        # Small models ramble at the API's temperature of 1.
        sampling_options(
            max_tokens=None,
            max_tokens_help="until the context is full",
            temperature=0.7,
            min_p=0.1,
        ),
        sampling_params,
    ),
    engine=(ENGINE_OPTIONS, engine_config),
)
def command(
    model: Model,
    params: SamplingParams,
    engine: EngineConfig,
    system: Annotated[
        str | None,
        typer.Option(help="System message.", show_default=False, metavar="TEXT", parser=words),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show /stats after each answer.")
    ] = False,
) -> None:
    """Chat with a model.

    Ctrl-C stops an answer, /help lists what you can type.
    """
    from octavo.cli.models import checkpoint
    from octavo.engine.load import load_engine
    from octavo.llm import LLM

    with LLM(load_engine(checkpoint(model, chat=True), engine)) as llm:
        Conversation(llm, params, system, verbose).run()


class Conversation:
    """Reads lines, answers them, and keeps what was said."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, verbose: bool) -> None:
        self.llm = llm
        self.params = params
        self.verbose = verbose
        self.stats = "nothing answered yet"
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        self.messages = [{"role": "system", "content": text}] if text else []
        self.system = text

    def run(self) -> None:
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  line editing and history for input()

            print("/help lists what you can type", file=sys.stderr)
        while True:
            try:
                line = input(">>> " if interactive else "").strip()
            except EOFError:
                if interactive:
                    print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
                continue
            if line in ("/exit", "/quit", "/bye"):
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.answer(line)

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            print(HELP, file=sys.stderr)
        elif name == "/stats":
            print(self.stats, file=sys.stderr)
        elif name == "/reset":
            self.set_system(self.system)
        elif name == "/system":
            self.set_system(rest.strip() or None)
        else:
            print(f"{name} is not known; /help lists what is", file=sys.stderr)

    def answer(self, line: str) -> None:
        """Stream one answer; both sides of the turn are kept, or neither when it is refused."""
        from octavo.checkpoint.base import ChatTemplateError
        from octavo.sample.params import InvalidParameter
        from octavo.schedule.request import AdmissionError

        self.messages.append({"role": "user", "content": line})
        start = time.monotonic()
        text = ""
        tokens = 0
        first = start
        try:
            rendered, ids = self.llm.chat_prompt(self.messages)
            for _, delta in self.llm.stream(
                {"prompt": rendered, "prompt_token_ids": ids}, self.params
            ):
                if not tokens:
                    first = time.monotonic()
                tokens += len(delta.token_ids)
                text += delta.text
                print(delta.text, end="", flush=True)
                if delta.record is not None and delta.record.error is not None:
                    self.messages.pop()
                    print(f"\n{delta.record.error}", file=sys.stderr)
                    return
                if delta.record is not None:
                    seconds = time.monotonic() - first
                    self.stats = (
                        f"{delta.record.prompt_tokens} prompt tokens "
                        f"({delta.record.cached_tokens} from the cache), first after "
                        f"{first - start:.2f} s; {tokens} new tokens"
                        + (f", {(tokens - 1) / seconds:.0f} tok/s" if tokens > 1 else "")
                    )
        except KeyboardInterrupt:
            self.stats = f"stopped after {tokens} new tokens"
            print(" (stopped)", end="", file=sys.stderr, flush=True)
        except (AdmissionError, ChatTemplateError, InvalidParameter) as error:
            self.messages.pop()
            print(f"{named_flags(str(error))} (/reset starts anew)", file=sys.stderr)
            return
        print()
        self.messages.append({"role": "assistant", "content": text})
        if self.verbose:
            print(self.stats, file=sys.stderr)
