"""octavo chat: a conversation in the terminal."""

from __future__ import annotations

import difflib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import columns, tell
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
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.llm import LLM
    from octavo.sampling.params import SamplingParams

EXAMPLES = (
    "octavo chat smollm2",
    'octavo chat smollm2 --system "Answer in one sentence." --temperature 0.3 --verbose',
)

HELP = {
    "/reset": "forget the conversation (also /clear)",
    "/system [TEXT]": "set the system message (empty: none) and forget the conversation",
    "/stats": "speed and tokens of the last answer",
    "/exit": "leave (also /bye, or Ctrl-D); Ctrl-C stops an answer and keeps the conversation",
    "//TEXT": "send a message that begins with a slash: //tmp is sent as /tmp",
    '"""': "begin a message of several lines, and end it",
    "Alt-Enter": "begin a new line; several lines that are pasted are one message",
}

COMMANDS = {
    "/help": "help", "/?": "help", "/reset": "reset", "/clear": "reset", "/system": "system",
    "/stats": "stats", "/exit": "exit", "/quit": "exit", "/bye": "exit",
}  # fmt: skip


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

    Ctrl-C stops an answer, /help lists what you can type. A paste of several lines is one message;
    so is what stands between triple quotes.
    """
    from octavo.cli.models import checkpoint
    from octavo.engine.load import load_engine
    from octavo.llm import LLM

    with LLM(load_engine(checkpoint(model, chat=True), engine)) as llm:
        Conversation(llm, params, system, verbose).run()


class Conversation:
    """Reads messages, answers them, and keeps what was said."""

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
        from octavo.cli.messages import (
            UnclosedMessage,
            piped_lines,
            read_message,
            terminal_lines,
        )

        terminal = sys.stdin.isatty()
        read_line = terminal_lines() if terminal else piped_lines()
        if terminal:
            tell("/help lists what you can type")
        typed = ""  # by us, for the user to change or send
        while True:
            try:
                text, quoted = read_message(read_line, ">>> " if terminal else "", typed)
            except UnclosedMessage:
                tell('the last message has no closing """: it was not sent')
                return
            except EOFError:
                return
            except KeyboardInterrupt:
                tell("(Ctrl-D or /exit leaves)")
                continue
            finally:
                typed = ""
            name, _, rest = text.partition(" ")
            # Commands have one line and one slash: a pasted text that begins with a path is none.
            if quoted or not text.startswith("/") or "\n" in text or "/" in name[2:]:
                if text:
                    self.answer(text)
            elif name.startswith("//"):
                self.answer(text[1:])
            elif name not in COMMANDS:
                near = difflib.get_close_matches(name, COMMANDS, n=1)
                tell(
                    f"{name} is not a command"
                    + (f"; did you mean {near[0]}?" if near else " (/help lists them).")
                    + f" To send it as a message: /{text}"
                )
                typed = f"/{text}"
            elif COMMANDS[name] == "exit":
                return
            else:
                self.command(COMMANDS[name], rest.strip())

    def command(self, name: str, rest: str) -> None:
        if name == "help":
            tell(columns(HELP))
        elif name == "stats":
            tell(self.stats)
        elif name == "reset":
            self.set_system(self.system)
        elif name == "system":
            self.set_system(rest or None)

    def answer(self, message: str) -> None:
        """Stream one answer; both sides of the turn are kept, or neither when it is refused."""
        from octavo.cli.endings import why_ended
        from octavo.cli.wrap import answer_writer
        from octavo.loader.base import ChatTemplateError
        from octavo.sampling.params import InvalidParameter
        from octavo.scheduler.request import AdmissionError

        self.messages.append({"role": "user", "content": message})
        start = time.monotonic()
        text = ""
        tokens = 0
        first = start
        ended = None
        writer = answer_writer(sys.stdout)
        try:
            rendered, ids = self.llm.chat_prompt(self.messages)
            for _, delta in self.llm.stream(
                {"prompt": rendered, "prompt_token_ids": ids}, self.params
            ):
                if not tokens:
                    first = time.monotonic()
                tokens += len(delta.token_ids)
                text += delta.text
                writer.feed(delta.text)
                if delta.record is not None and delta.record.error is not None:
                    self.messages.pop()
                    writer.end()
                    print()
                    tell(delta.record.error)
                    return
                if delta.record is not None:
                    ended = why_ended(
                        *(delta, tokens, self.params, self.llm.loaded.max_model_len),
                        "/reset starts anew",
                    )
                    seconds = time.monotonic() - first
                    self.stats = (
                        f"{plural(delta.record.prompt_tokens, 'prompt token')} "
                        f"({delta.record.cached_tokens} from the cache), first after "
                        f"{first - start:.2f} s; {plural(tokens, 'new token')}"
                        + (f", {(tokens - 1) / seconds:.0f} tok/s" if tokens > 1 else "")
                    )
            writer.end()
        except KeyboardInterrupt:
            self.stats = f"stopped after {plural(tokens, 'new token')}"
            writer.end()
            ended = "stopped by Ctrl-C"
        except (AdmissionError, ChatTemplateError, InvalidParameter) as error:
            self.messages.pop()
            tell(f"{named_flags(str(error))} (/reset starts anew)")
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": text})
        if ended:
            tell(f"({ended})")
        if self.verbose:
            tell(self.stats)
