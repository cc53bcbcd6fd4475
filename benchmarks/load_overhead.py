"""What the load generator itself costs: its share of a core at 2,000 tokens a second.

    python benchmarks/load_overhead.py [--json]

A server of bare sockets in this process streams to 64 requests: in steps, where all get a token at
once, as engines that batch send them; and in turn, a token every half millisecond, so that each
wakes the client by itself, which is the worst there is (most of that is the system's, for waking).
`octavo bench serve` reads them in a process of its own and measures its processor time.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from threading import Thread

from _script import as_script

STREAMS, RATE, SECONDS = 64, 2000, 6
TOKENS = RATE * SECONDS // STREAMS

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"data":[{"id":"m"}]}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(choices: str, usage: str) -> bytes:
    """As long as the servers in use write them."""
    return chunk(
        b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
        b'"created":1700000000,"model":"some-org/some-model-7b-instruct","choices":%s,"usage":%s}'
        b"\n\n" % (choices.encode(), usage.encode())
    )


CHOICE = '[{"index":0,"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null}]'
TOKEN = event(CHOICE, "null")
LAST = event(CHOICE.replace('"finish_reason":null', '"finish_reason":"length"'), "null")
END = (
    event("[]", f'{{"prompt_tokens":32,"total_tokens":{TOKENS + 32},"completion_tokens":{TOKENS}}}')
    + chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


def asked(connection: socket.socket) -> bytes:
    """The first line of a request; its body is read and forgotten."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    missing = (int(found[1]) if found else 0) - len(body)
    while missing > 0:
        missing -= len(connection.recv(missing))
    return head.split(b"\r\n")[0]


def serve(listener: socket.socket, together: int) -> None:
    """Answers the list of models, waits for all streams, and then keeps its own time: ``together``
    tokens at once.
    """
    streams: list[socket.socket] = []
    while len(streams) < STREAMS:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not (line := asked(connection)).startswith(b"POST /v1/completions"):
            known = line.startswith(b"GET /v1/models")
            body = MODELS if known else b""
            status = b"200 OK" if known else b"404 Not Found"
            connection.send(
                b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)
            )
        connection.send(HEAD)
        streams.append(connection)
    begin = time.perf_counter()
    for turn in range(TOKENS * STREAMS):
        due = begin + turn // together * together / RATE
        if (early := due - time.perf_counter()) > 0:
            time.sleep(early)
        streams[turn % STREAMS].send(TOKEN if turn < (TOKENS - 1) * STREAMS else LAST)
    for connection in streams:
        connection.send(END)
    for connection in streams:
        connection.close()


def measure(together: int) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS * 2) as listener:
        Thread(target=serve, args=(listener, together), daemon=True).start()
        child = subprocess.run(
            [sys.executable, "-c", "from octavo.cli import main; main()", "bench", "serve",
             "--port", str(listener.getsockname()[1]), "--num-prompts", str(STREAMS),
             "--dataset-name", "random", "--random-input-len", "32",
             "--random-output-len", str(TOKENS), "--prompt-format", "text", "--json"],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    result = json.loads(child.stdout)
    if result["total_output_tokens"] != TOKENS * STREAMS:
        raise RuntimeError(f"{result['failures']} {result['notices']}")
    events = result["total_output_tokens"]
    return {
        "tokens_per_s": result["output_throughput"],
        "cpu_share": result["generator_cpu"],
        "us_per_token": result["generator_cpu"] * result["duration"] / events * 1e6,
        "median_itl_ms": result["median_itl_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = {"in steps": measure(STREAMS), "each by itself": measure(1)}
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"| {STREAMS} streams, tokens arrive | tokens/s | share of a core | µs a token |")
    print("|---|---|---|---|")
    for name, row in found.items():
        print(
            f"| {name} | {row['tokens_per_s']:.0f} | {row['cpu_share']:.1%} "
            f"| {row['us_per_token']:.1f} |"
        )


if __name__ == "__main__":
    as_script(main)
