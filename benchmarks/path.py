"""Files and functions of Octavo that a chat enters, from its arrival to the end of its answer.

    python benchmarks/path.py [--json] [--list] [--case greedy]

Each case is a server in a process of its own (`octavo serve` with a tiny model), all of whose
threads are profiled while a client sends streamed chats and reads the answers, and until the server
is idle again:

greedy      one chat, greedily
preempted   three chats that do not fit into the KV cache together, so that some are preempted
speculated  one chat with drafts, some of which are accepted

What is loaded or made at the first request is left out by a chat before. Functions are those of
src/octavo that are entered, each counted once; comprehensions and generator expressions are not
counted, nor are functions in C++ and in the processes that render chat templates. ``--list`` shows
the functions in the order in which they are entered first, with the threads.

It needs nothing of Octavo but the command line, and so compares any two trees: run it with the
Python of each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from _behaviour import models
from _behaviour.serving import Server
from _script import as_script

_OPTIONS = ("--served-model-name", "m", "--max-num-seqs", "4", "--uvicorn-log-level", "error")
_TIGHT = ("--max-model-len", "128", "--kv-cache-memory", "20KiB")  # 10 blocks; a chat has up to 8
_DRAFTS = '{"method": "suffix", "num_speculative_tokens": 3}'
# Of each case: options, how many chats at once, tokens of an answer, a metric that has to grow.
CASES: dict[str, tuple[tuple[str, ...], int, int, str]] = {
    "greedy": ((), 1, 40, "octavo:generation_tokens_total"),
    "preempted": (_TIGHT, 3, 105, "octavo:num_preemptions_total"),
    "speculated": (
        ("--speculative-config", _DRAFTS),
        *(1, 60, "octavo:spec_decode_num_accepted_tokens_total"),
    ),
}
_NO_FUNCTION = re.compile(r"<(listcomp|dictcomp|setcomp|genexpr|module)>$")
_REST = 0.5  # seconds until what is done after an answer is done
_PATIENCE = 120.0  # seconds for the server to start


class Tracer:
    """Notes the functions of the package that are entered by any thread while it is on."""

    def __init__(self, package: Path) -> None:
        self.on = False
        self.entered: dict[CodeType, str] = {}  # with the thread that was the first
        self._package = f"{package}{os.sep}"

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call":
            code = frame.f_code
            if code not in self.entered and code.co_filename.startswith(self._package):
                self.entered[code] = threading.current_thread().name

    def functions(self) -> list[dict[str, str]]:
        return [
            {
                "file": code.co_filename.removeprefix(self._package),
                "function": code.co_qualname,
                "thread": re.sub(r"[-_ ]?\d+.*", "", thread),
            }
            for code, thread in self.entered.items()
            if not _NO_FUNCTION.search(code.co_qualname)
        ]


def traced(case: str) -> list[dict[str, str]]:
    """Serve in this process, ask from a thread, and return the functions."""
    import octavo
    from octavo.cli import main

    options, chats, length, metric = CASES[case]
    tracer = Tracer(Path(octavo.__file__).parent)
    failed: list[BaseException] = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Server(free.getsockname()[1])

    def ask(content: str) -> None:
        body = {
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "temperature": 0,
            "max_tokens": length,
            "ignore_eos": True,
        }
        answer = server.ask("POST", "/v1/chat/completions", body)
        if b"[DONE]" not in answer.body:
            raise SystemExit(f"{case}: {answer.body.decode()}")

    def value() -> float:
        text = server.ask("GET", "/metrics").body.decode()
        found = re.search(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def client() -> None:
        try:
            deadline = time.monotonic() + _PATIENCE
            while not server.ready() and time.monotonic() < deadline:
                time.sleep(0.05)
            ask("Hi")
            before = value()
            time.sleep(_REST)
            tracer.on = True
            asking = [
                threading.Thread(target=ask, args=(f"Hello {at}",)) for at in range(1, chats + 1)
            ]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
            time.sleep(_REST)
            tracer.on = False
            if value() <= before:
                raise SystemExit(f"{case}: {metric} has not grown")
        except BaseException as error:
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with tempfile.TemporaryDirectory() as folder:
        model = models.make("talking", Path(folder))
        sys.argv = ["octavo", "serve", model, "--port", str(server.port), *_OPTIONS, *options]
        threading.Thread(target=client, daemon=True).start()
        threading.setprofile(tracer.profile)
        sys.setprofile(tracer.profile)
        try:
            main()
        except SystemExit as error:
            if error.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    if failed:
        raise failed[0]
    return tracer.functions()


def in_its_process(case: str) -> list[dict[str, str]]:
    command = [sys.executable, __file__, "--case", case, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: list[dict[str, str]] = json.loads(done.stdout)[case]
    return found


def counts(functions: Sequence[dict[str, str]]) -> tuple[int, int]:
    """Return how many files and how many functions there are."""
    distinct = {(each["file"], each["function"]) for each in functions}
    return len({file for file, _ in distinct}), len(distinct)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="show the functions")
    given = parser.parse_args()
    if given.case:
        found = {given.case: traced(given.case)}
    else:
        found = {case: in_its_process(case) for case in CASES}
    if given.json:
        print(json.dumps(found))
        return
    for case, functions in found.items() if given.list else ():
        print(case)
        for each in functions:
            print(f"  {each['file']:<36} {each['function']:<48} {each['thread']}")
    print(f"{'case':<12}{'files':>8}{'functions':>12}")
    every = [each for functions in found.values() for each in functions]
    for case, functions in [*found.items(), ("in all", every)]:
        files, count = counts(functions)
        print(f"{case:<12}{files:>8}{count:>12}")


if __name__ == "__main__":
    as_script(main)
