"""llama.cpp's own n-gram speculation, through ``llama-server``, on given prompts, greedy."""

from __future__ import annotations

import json
import statistics
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from _peers.serving import free_port, running

# Its defaults, and sizes nearer to Octavo's: what it looks up, and how much it drafts.
SETTINGS: dict[str, list[str]] = {
    "none": [],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "ngram-simple, 3 → 8": [
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
    ],
    "ngram-simple, 3 → 16": [
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16"),
    ],
    "ngram-map-k, 3 → 8": [
        *("--spec-type", "ngram-map-k"),
        *("--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "8"),
    ],
    "ngram-cache": ["--spec-type", "ngram-cache"],
}


class Speed(NamedTuple):
    tok_s: float  # of decoding, as the server says; the median of the rounds
    acceptance_rate: float | None  # None: it drafted nothing
    token_ids: list[int]


def measure(
    binaries: str, model: str, prompts: dict[str, list[int]], length: int, rounds: int, threads: int
) -> dict[str, dict[str, Speed]]:
    """By setting and name of the prompt. One request at a time, no cached prompts, no stops."""
    found: dict[str, dict[str, Speed]] = {}
    program = Path(binaries).resolve() / "llama-server"
    for setting, flags in SETTINGS.items():
        port = free_port()
        command = [str(program), "-m", model, "-t", str(threads), "-c", "4096", "-np", "1"]
        command += ["-fa", "on", "--no-ui", "--cache-ram", "0", "--host", "127.0.0.1"]
        with running([*command, "--port", str(port), *flags], port):
            found[setting] = {
                name: _speed(port, prompt, length, rounds) for name, prompt in prompts.items()
            }
    return found


def _speed(port: int, prompt: list[int], length: int, rounds: int) -> Speed:
    answers = [_answer(port, prompt, length) for _ in range(rounds + 1)][1:]  # one warms up
    timings = [answer["timings"] for answer in answers]
    drafted = sum(each.get("draft_n", 0) for each in timings)
    accepted = sum(each.get("draft_n_accepted", 0) for each in timings)
    return Speed(
        statistics.median(each["predicted_per_second"] for each in timings),
        accepted / drafted if drafted else None,
        answers[-1].get("tokens", []),
    )


def _answer(port: int, prompt: list[int], length: int) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "n_predict": length,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
