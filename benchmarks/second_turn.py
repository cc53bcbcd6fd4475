"""The second turn of a long conversation with a model that has recurrent layers.

    python benchmarks/second_turn.py FILE [--llama-cpp PATH] [--tokens 8000] [--json FILE]

A first turn of so many tokens and an answer of 32; then, each time with another question of 24
tokens behind both, the time until the answer's first token:

- ``second turn``: right after the first;
- ``after another``: when a second conversation of that length has taken the place of the first in
  the cache. Octavo's pool holds little more than one conversation and host memory several;
  llama.cpp has one slot, and keeps what it puts aside in its ``--cache-ram``;
- ``restarted``: by a new server process, from what Octavo keeps on disk (in the page cache).

``computed`` is a conversation that nobody knows, of the same length. llama.cpp's server runs as it
comes and without checkpoints (``--ctx-checkpoints 0``). Prompts are token ids, the same for all.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from _peers.serving import free_port, running
from _script import as_script
from octavo import loader
from octavo.engine.config import EngineConfig
from octavo.kv_cache.cache import peak_blocks

ANSWER, QUESTION = 32, 24  # tokens
ROOM = 64  # tokens of a conversation beyond its first turn
KINDS = ("computed", "second turn", "after another", "restarted")


class Answer(NamedTuple):
    seconds: float  # until all of it was there
    token_ids: list[int]
    cached: int  # tokens of the prompt


class Server(NamedTuple):
    """How one is started on a port and asked."""

    command: Callable[[int], list[str]]
    ask: Callable[[int, list[int], int], Answer]
    restarts: bool  # it finds again what it knew


def post(port: int, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    content = json.dumps(body)
    began = time.perf_counter()
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    seconds = time.perf_counter() - began
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{path} answered {response.status}: {data[:300]!r}")
    return seconds, json.loads(data)


def ask_octavo(port: int, prompt: list[int], tokens: int) -> Answer:
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    seconds, answer = post(port, "/v1/completions", body)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Answer(seconds, answer["choices"][0]["token_ids"], details.get("cached_tokens", 0))


def ask_llama_cpp(port: int, prompt: list[int], tokens: int) -> Answer:
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True,
            "return_tokens": True, "cache_prompt": True}  # fmt: skip
    seconds, answer = post(port, "/completion", body)
    return Answer(seconds, answer["tokens"], answer["timings"]["cache_n"])


def octavo(model: Path, tokens: int, threads: int, folder: str) -> Server:
    layout = EngineConfig().layout_of(loader.load(model).config)
    length = tokens + ROOM
    # A conversation, the states that are kept at the ends of its turns, and some room.
    blocks = int(1.1 * peak_blocks(layout, length)) + 6 * layout.state_blocks
    pool = blocks * layout.block_bytes

    def command(port: int) -> list[str]:
        start = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", str(model)]
        start += ["--port", str(port), "--threads", str(threads), "--max-model-len", str(length)]
        start += ["--served-model-name", "model", "--max-num-seqs", "4"]
        start += ["--kv-cache-memory", str(pool), "--kv-offload-memory", str(3 * pool)]
        return [*start, "--kv-offload-dir", folder]

    return Server(command, ask_octavo, restarts=True)


def llama_cpp(program: Path, model: Path, tokens: int, threads: int, *more: str) -> Server:
    def command(port: int) -> list[str]:
        start = [str(program), "-m", str(model), "-t", str(threads), "-c", str(tokens + ROOM)]
        start += ["-np", "1", "-fa", "on", "--no-ui", "--host", "127.0.0.1", "--port", str(port)]
        return [*start, *more]

    return Server(command, ask_llama_cpp, restarts=False)


def conversation(server: Server, tokens: int, vocab: int) -> Iterator[tuple[str, Answer]]:
    """Yield each kind of turn with its answer."""
    rng = random.Random(1)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(vocab // 4, vocab * 3 // 4) for _ in range(count)]

    port = free_port()
    with running(server.command(port), port):
        server.ask(port, drawn(64), 8)  # a warm-up
        first = drawn(tokens)
        known = first + server.ask(port, first, ANSWER).token_ids
        yield "second turn", server.ask(port, known + drawn(QUESTION), 1)
        yield "computed", server.ask(port, drawn(len(known) + QUESTION), 1)
        yield "after another", server.ask(port, known + drawn(QUESTION), 1)
    if server.restarts:
        port = free_port()
        with running(server.command(port), port):
            server.ask(port, drawn(64), 8)
            yield "restarted", server.ask(port, known + drawn(QUESTION), 1)


@contextmanager
def servers(args: argparse.Namespace) -> Iterator[dict[str, Server]]:
    sizes = (args.model, args.tokens, args.threads)
    with tempfile.TemporaryDirectory(prefix="octavo-kv-", ignore_cleanup_errors=True) as folder:
        found = {"octavo": octavo(*sizes, folder)}
        if args.llama_cpp is not None:
            program = args.llama_cpp.resolve()
            found["llama.cpp"] = llama_cpp(program, *sizes)
            without = llama_cpp(program, *sizes, "--ctx-checkpoints", "0")
            found["llama.cpp, no checkpoints"] = without
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--llama-cpp", type=Path, help="its llama-server, to compare with")
    parser.add_argument("--server", action="append", help="of those, by name (default: all)")
    parser.add_argument("--tokens", type=int, default=8000, help="of the first turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    args.model = args.model.resolve()
    vocab = loader.load(args.model).config.vocab_size
    found: dict[str, dict[str, Answer]] = {}
    with servers(args) as started:
        for name in args.server or started:
            server, found[name] = started[name], {}
            for kind, answer in conversation(server, args.tokens, vocab):
                found[name][kind] = answer
                print(f"{name}, {kind}: {1e3 * answer.seconds:.0f} ms, {answer.cached} cached",
                      flush=True)  # fmt: skip
    print("\n| until the first token, ms (cached) | " + " | ".join(found) + " |")
    print("|---" * (len(found) + 1) + "|")
    for kind in KINDS:
        cells = []
        for answers in found.values():
            answer = answers.get(kind)
            cells.append(f"{1e3 * answer.seconds:.0f} ({answer.cached})" if answer else "–")
        print(f"| {kind} | " + " | ".join(cells) + " |")
    if args.json:
        rows = {n: {k: a._asdict() for k, a in each.items()} for n, each in found.items()}
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    as_script(main)
