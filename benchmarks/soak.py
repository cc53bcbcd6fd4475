"""Half an hour of mixed load on a server, a fifth of it aborted: nothing may grow, slow down, get
lost or change.

    python benchmarks/soak.py [MODEL] [--minutes 30] [--clients 16] [--abort 0.2] [--json]
    python benchmarks/soak.py --url http://127.0.0.1:8000 …

Starts `octavo serve MODEL` (default smollm2; what follows ``--`` are options of it) or takes a
server that runs, with no other load on it. Clients send chats, completions of short and long
prompts, several choices, logprobs, stop strings and invalid bodies, streamed or not, one after
another; an abort is a connection that is dropped before the answer or in the middle of it. At the
end all has to be idle, and then:

- samples: they were taken until the end;
- memory: the server's resident memory, a mean over the last minute against one after minute five
  (of a short run: a third), within 2 %;
- throughput: tokens a second of the last third against the third before it, within 10 %;
- blocks: none in use, nothing running or waiting;
- counters: what clients saw, what records say and what the engine counted are the same;
- answers: a greedy request, asked again and again, has had one answer.

Exits with 1 if one of them is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from _script import as_script

SEED = 11
EVERY = 5.0  # seconds between samples
BASELINE = 300.0  # seconds after which memory is taken as what the server needs
MEMORY_BAR = 0.02
THROUGHPUT_BAR = 0.10
WORDS = (
    *("paper", "ink", "folio", "leaf", "quire", "margin", "gutter", "press", "type", "case"),
    *("galley", "proof", "plate", "spine", "board", "thread", "glue", "title", "chapter", "verse"),
    *("note", "index", "page", "sheet", "fold", "cut", "bind", "sew", "stamp"),
)
SYSTEM = "You are a printer of books. Answer in a few plain words. " + " ".join(WORDS * 3)


@dataclass
class Counts:
    """What the clients saw."""

    sent: int = 0
    finished: int = 0
    aborted: int = 0
    begun: int = 0  # of these, those that had been answered in part
    invalid: int = 0
    refused: int = 0  # 429 and 503
    wrong: list[str] = field(default_factory=list)  # what should not have been
    prompt_tokens: int = 0  # of those finished
    completion_tokens: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # that all of it took


@dataclass
class Sample:
    seconds: float  # since the start
    rss: float  # bytes
    generated: float  # tokens, by the server's counter


# --- the load ------------------------------------------------------------------------------------


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def body(rng: random.Random, model: str) -> tuple[str, str, dict[str, Any]]:
    """Kind, path and body of a random request."""
    kind = rng.choices(
        ("chat", "completion", "long", "choices", "logprobs", "stop", "greedy", "invalid"),
        (30, 20, 6, 8, 8, 8, 15, 5),
    )[0]
    common: dict[str, Any] = {"model": model, "max_tokens": rng.randint(4, 64)}
    if rng.random() < 0.7:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": text(rng, rng.randint(3, 60))},
        ]
        return kind, "/v1/chat/completions", common | {"messages": messages}
    prompt = text(rng, rng.randint(1, 60))
    if kind == "long":
        prompt, common["max_tokens"] = text(rng, rng.randint(300, 700)), 8
    elif kind == "choices":
        common |= {"n": rng.randint(2, 4)}
    elif kind == "logprobs":
        common |= {"logprobs": rng.randint(0, 5)}
    elif kind == "stop":
        common |= {"stop": [rng.choice(WORDS), " the", "\n"]}
    elif kind == "greedy":
        prompt = text(random.Random(rng.randrange(6)), 40)
        common |= {"temperature": 0, "max_tokens": 24}
    elif kind == "invalid":
        common |= rng.choice(
            ({"temperature": -1}, {"max_tokens": 10**6}, {"top_p": 2}, {"logit_bias": {"-1": 1}})
        )
    return kind, "/v1/completions", common | {"prompt": prompt}


def dechunked(content: bytes) -> bytes:
    parts = []
    while content:
        size, _, content = content.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            break
        parts.append(content[:count])
        content = content[count + 2 :]
    return b"".join(parts)


class Client:
    """One connection after another."""

    def __init__(self, url: str, model: str, seed: int, aborts: float, counts: Counts) -> None:
        place = urlsplit(url)
        self._host, self._port = place.hostname or "127.0.0.1", place.port or 80
        self._model = model
        self._rng = random.Random(seed)
        self._aborts = aborts
        self._counts = counts

    async def run(self, until: float, pause: float, answers: dict[str, str]) -> None:
        while time.monotonic() < until:
            kind, path, request = body(self._rng, self._model)
            self._counts.sent += 1
            self._counts.kinds[kind] = self._counts.kinds.get(kind, 0) + 1
            abort = kind != "invalid" and self._rng.random() < self._aborts
            try:
                answer = await self._ask(path, request, abort)
            except OSError as error:
                self._counts.wrong.append(f"{kind}: {error!r}")
                await asyncio.sleep(1)
                continue
            if answer is None:
                self._counts.aborted += 1
            else:
                await self._read(kind, request, *answer, answers)
            if pause:
                await asyncio.sleep(self._rng.expovariate(1 / pause))

    async def _ask(
        self, path: str, request: dict[str, Any], abort: bool
    ) -> tuple[int, bytes] | None:
        """Status and body; None when it was aborted."""
        content = json.dumps(request).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(
                f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode()
                + content
            )
            await writer.drain()
            if abort:
                if self._rng.random() < 0.5:
                    await asyncio.sleep(self._rng.expovariate(10))
                else:
                    part = await reader.read(self._rng.randrange(100, 4000))
                    self._counts.begun += part.startswith(b"HTTP/1.1 200 ")
                return None
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.transport.abort()
        if b"transfer-encoding: chunked" in head.lower():
            rest = dechunked(rest)
        return int(head.split(b" ", 2)[1]), rest

    async def _read(
        self,
        kind: str,
        request: dict[str, Any],
        status: int,
        content: bytes,
        answers: dict[str, str],
    ) -> None:
        counts = self._counts
        if status in (429, 503):
            counts.refused += 1
            await asyncio.sleep(0.5)
            return
        if kind == "invalid":
            counts.invalid += status == 400
        if status != (400 if kind == "invalid" else 200):
            counts.wrong.append(f"{kind}: {status} {content[:200]!r}")
        if status != 200:
            return
        try:
            words, reasons, usage = self._parsed(request, content)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            counts.wrong.append(f"{kind}: {error!r} in {content[-200:]!r}")
            return
        if len(reasons) != request.get("n", 1) or not set(reasons) <= {"stop", "length"}:
            counts.wrong.append(f"{kind}: ended with {reasons}")
        counts.finished += 1
        counts.prompt_tokens += usage["prompt_tokens"]
        counts.completion_tokens += usage["completion_tokens"]
        if kind == "greedy" and answers.setdefault(request["prompt"], words) != words:
            counts.wrong.append(f"another answer: {words!r}, not {answers[request['prompt']]!r}")

    @staticmethod
    def _parsed(request: dict[str, Any], content: bytes) -> tuple[str, list[str], dict[str, int]]:
        """Text of the choices one after another, their finish reasons, and the usage."""
        if not request.get("stream"):
            answer = json.loads(content)
            chunks, usage = [answer], answer["usage"]
        else:
            lines = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
            if lines[-1] != b"[DONE]":
                raise ValueError("the stream does not end with [DONE]")
            chunks = [json.loads(line) for line in lines[:-1]]
            usage = chunks[-1]["usage"]
        texts: dict[int, str] = {}
        reasons = []
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            piece = choice.get("text")
            if piece is None:
                piece = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
        return "\0".join(texts[index] for index in sorted(texts)), reasons, usage


# --- the server ----------------------------------------------------------------------------------


class Server:
    """Any server of ours, by its routes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            content: bytes = answer.read()
        return content.decode()

    def model(self) -> str:
        name: str = json.loads(self.get("/v1/models"))["data"][0]["id"]
        return name

    def metrics(self) -> dict[str, float]:
        """By name, summed over labels; ``request_success_total`` also by reason."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                name = sample.name.removeprefix("octavo:")
                values[name] = values.get(name, 0.0) + sample.value
                if name == "request_success_total":
                    reason = f"{name}:{sample.labels['finished_reason']}"
                    values[reason] = values.get(reason, 0.0) + sample.value
        return values


@contextmanager
def started(model: str, options: list[str]) -> Iterator[Server]:
    """`octavo serve` in a process of its own, on a free port; its log goes to standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from octavo.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "serve", model, "--port", str(port), *options]
    )
    server = Server(f"http://127.0.0.1:{port}")
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"octavo serve {model} ended with {process.returncode}")
            try:
                server.get("/ready")
                break
            except OSError:
                time.sleep(0.1)
        yield server
        process.send_signal(signal.SIGTERM)
        if process.wait(60) not in (0, -signal.SIGTERM):
            raise SystemExit(f"octavo serve ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()


# --- a run ---------------------------------------------------------------------------------------


async def soak(
    server: Server, minutes: float, clients: int, aborts: float, pause: float
) -> tuple[Counts, list[Sample], dict[str, float]]:
    counts, samples = Counts(), list[Sample]()
    answers: dict[str, str] = {}
    model = server.model()
    begin = time.monotonic()
    until = begin + minutes * 60

    async def watch() -> None:
        while True:
            now = await asyncio.to_thread(server.metrics)
            samples.append(
                Sample(
                    time.monotonic() - begin,
                    now["process_resident_memory_bytes"],
                    now["generation_tokens_total"],
                )
            )
            await asyncio.sleep(min(EVERY, minutes))

    watching = asyncio.create_task(watch())
    await asyncio.gather(
        *(
            Client(server.url, model, SEED + at, aborts, counts).run(until, pause, answers)
            for at in range(clients)
        )
    )
    counts.seconds = time.monotonic() - begin
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching  # what it died of, if it did
    for _ in range(200):  # what was dropped last
        last = await asyncio.to_thread(server.metrics)
        if not last["num_requests_running"] + last["num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    return counts, samples, last


@dataclass
class Check:
    what: str
    found: str
    good: bool


def mean(samples: list[Sample], since: float, until: float) -> float:
    return statistics.fmean(each.rss for each in samples if since <= each.seconds <= until)


def rate(samples: list[Sample], since: float, until: float) -> float:
    within = [each for each in samples if since <= each.seconds <= until]
    return (within[-1].generated - within[0].generated) / (within[-1].seconds - within[0].seconds)


def checks(
    counts: Counts, samples: list[Sample], first: dict[str, float], last: dict[str, float]
) -> list[Check]:
    end = samples[-1].seconds
    since = min(BASELINE, end / 3)
    window = min(60.0, end / 6)
    before, after = mean(samples, since, since + window), mean(samples, end - window, end)
    early, late = rate(samples, end / 3, 2 * end / 3), rate(samples, 2 * end / 3, end)

    def delta(name: str) -> int:
        return round(last[name] - first.get(name, 0.0))

    success = "request_success_total"
    done = delta(f"{success}:stop") + delta(f"{success}:length")
    left, failed = delta(f"{success}:abort"), delta(f"{success}:error")
    generated, of_records = delta("generation_tokens_total"), delta("request_generation_tokens_sum")
    prompts, prompts_of_records = delta("prompt_tokens_total"), delta("request_prompt_tokens_sum")
    admitted, ended = delta("requests_admitted_total"), done + left + failed
    idle = [last[name] for name in ("num_requests_running", "num_requests_waiting")]
    age = counts.seconds - end
    return [
        Check(
            "samples",
            f"{len(samples)}, the last of them {age:.1f} s before the end",
            age <= 4 * EVERY,
        ),
        Check(
            "memory",
            f"{before / 2**20:.1f} MiB after {since:.0f} s, {after / 2**20:.1f} MiB at the end "
            f"({after / before - 1:+.2%})",
            after <= before * (1 + MEMORY_BAR),
        ),
        Check(
            "throughput",
            f"{early:.1f} tokens/s in the middle third, {late:.1f} in the last "
            f"({late / early - 1:+.1%})",
            late >= early * (1 - THROUGHPUT_BAR),
        ),
        Check(
            "blocks",
            f"{last['kv_cache_usage_perc']:.2%} in use, {idle[0]:.0f} running, {idle[1]:.0f} "
            "waiting",
            not last["kv_cache_usage_perc"] and not any(idle),
        ),
        # Who leaves may have been answered already, or may not have been read yet.
        Check(
            "outcomes",
            f"{counts.finished} answers read, {counts.aborted} dropped, {counts.begun} of them in "
            f"the middle; the server: {done} finished, {left} aborted, {failed} failed",
            counts.finished <= done
            and counts.finished + counts.begun <= done + left <= counts.finished + counts.aborted
            and not failed,
        ),
        Check(
            "generated tokens",
            f"engine {generated}, records {of_records}, answers read {counts.completion_tokens}",
            counts.completion_tokens <= generated == of_records,
        ),
        Check(
            "prompt tokens",
            f"engine {prompts}, records {prompts_of_records}, answers read {counts.prompt_tokens}",
            counts.prompt_tokens <= prompts <= prompts_of_records,
        ),
        Check(
            "records",
            f"{admitted} requests admitted by the engine, {ended} outcomes, "
            f"{delta('request_prompt_tokens_count')} records",
            admitted == ended == delta("request_prompt_tokens_count"),
        ),
        Check(
            "answers",
            f"{len(counts.wrong)} wrong" + "".join(f"\n  {each}" for each in counts.wrong[:5]),
            not counts.wrong,
        ),
    ]


def run(server: Server, args: argparse.Namespace) -> int:
    first = server.metrics()
    counts, samples, last = asyncio.run(
        soak(server, args.minutes, args.clients, args.abort, args.pause)
    )
    found = checks(counts, samples, first, last)
    if args.json:
        result = {
            "minutes": args.minutes,
            "clients": args.clients,
            "counts": asdict(counts),
            "checks": [asdict(check) for check in found],
            "samples": [asdict(sample) for sample in samples],
            "processors": os.cpu_count(),
        }
        print(json.dumps(result, indent=1))
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.kinds.items()))
        print(f"{args.minutes:g} minutes, {args.clients} clients, {counts.sent} requests: {kinds}")
        for check in found:
            print(f"{'ok ' if check.good else 'BAD'}  {check.what:17} {check.found}")
    return 0 if all(check.good for check in found) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--url", help="of a server that runs, instead of starting one")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--abort", type=float, default=0.2, help="share of the requests, 0 … 1")
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds between requests")
    parser.add_argument("--json", action="store_true")
    own, _, options = _split(sys.argv[1:])
    args = parser.parse_args(own)
    if args.url:
        raise SystemExit(run(Server(args.url.rstrip("/")), args))
    with started(args.model, options) as server:
        status = run(server, args)
    raise SystemExit(status)


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """What is ours, and what goes to `octavo serve`."""
    if "--" not in arguments:
        return arguments, "", []
    at = arguments.index("--")
    return arguments[:at], "--", arguments[at + 1 :]


if __name__ == "__main__":
    as_script(main)
