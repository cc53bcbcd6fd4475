"""The command line: flags with types and defaults, and what some commands print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _behaviour import models

_DEVICE = "memory=48,int8=940,bf16=470,fp32=235,capacity=64"
_TINY = str(models.ORACLE / "tiny-llama.gguf")
# Deterministic commands, of which output, error and exit code are recorded. TINY and DEVICE stand
# for the two above.
_RUNS = """\
--version
list --json
pull --list
generate smollm2 'The capital of France is' --temperature 0 --max-tokens 8
generate smollm2 A B --seed 3 --max-tokens 8 --logprobs 2 --json
generate smollm2 Hi --chat --temperature 0 --max-tokens 8
speculate smollm2 'one two one two' --temperature 0 --max-tokens 8
inspect TINY
inspect gemma3-270m --kv-cache-memory 256MiB
plan memory llama-3-8b --device h100 --users 8
plan memory no-such-preset
plan batching --step-ms 20 --per-sequence-ms 0.1 --input-len 128
plan quantization smollm2 --device DEVICE
plan roofline llama-3-8b --device DEVICE
simulate llama-3-8b --device h100 --num-prompts 30 --request-rate 2
tune --slo
rm no-such-model
pull no-such-model
--no-such-flag
no-such-command
serv
serve
serve /none/such.gguf
serve no-such-model
serve TINY --no-such-flag
serve TINY --max-model-len none
serve TINY --max-model-len 1
serve TINY --max-num-seqs 0
serve TINY --kv-cache-memory 4KB
serve TINY --kv-cache-dtype fp8
serve TINY --isa neon
serve TINY --scheduling-policy lifo
serve TINY --speculative-config '{'
serve TINY --speculative-config '{"method": "ngram", "typo": 1}'
serve TINY --port 70000
serve TINY --slo ttft=fast
serve TINY --api-key-file /none/such.json
serve TINY --api-key ''
serve TINY --allowed-hosts 'a b'
serve TINY --uvicorn-log-level loud
serve TINY --otlp-traces-endpoint ftp://x
serve TINY --kv-offload-disk 1GiB
serve TINY --tensor-parallel-size 2
serve --model TINY --max-model-len 1
serve TINY --generation-config /none
serve TINY --override-generation-config '[]'
generate TINY x --temperature -1
generate TINY x --logit-bias x
generate TINY x --chat
chat TINY
run smollm2
bench serve --base-url ftp://x
quantize TINY --method magic
top ftp://x
"""


def record(folder: Path, share: float) -> dict[str, Any]:
    commands = models.first(_walk(), share)
    flags = {name: dict(map(_option, command.params)) for name, command in commands}
    runs = models.first(["", *_RUNS.splitlines()], share)
    pages = [" ".join(name.split()[1:]) + " --help" for name in flags]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ran = dict(zip([*runs, *pages], pool.map(_ran, [*runs, *pages]), strict=True))
    wording = {name: ran.pop(page)["out"] for name, page in zip(flags, pages, strict=True)}
    return {"flags": flags, "runs": ran, "wording": wording}


def _walk() -> Iterator[tuple[str, Any]]:
    """Yield the name and the command object of each command, groups first."""
    import typer

    from octavo.cli import app

    left: list[tuple[str, Any]] = [("octavo", typer.main.get_command(app))]
    while left:
        name, command = left.pop(0)
        yield name, command
        children = getattr(command, "commands", {})
        left += [(f"{name} {child}", each) for child, each in children.items()]


def _option(parameter: Any) -> tuple[str, dict[str, Any]]:
    facts = {
        name: str(getattr(value, "value", value))
        for name in ("metavar", "default", "show_default", "envvar")
        if not callable(value := getattr(parameter, name, None))
    }
    for name in ("required", "multiple", "is_flag", "hidden"):
        facts[name] = str(getattr(parameter, name, False))
    opts = [*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ())]
    return " ".join(opts) or str(parameter.name), facts


def _ran(run: str) -> dict[str, Any]:
    stands_for = {"TINY": _TINY, "DEVICE": _DEVICE}
    words = [stands_for.get(word, word) for word in shlex.split(run)]
    done = subprocess.run(
        [sys.executable, "-m", "octavo", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
    )
    out, err = (_plain(text, words[:1] == ["speculate"]) for text in (done.stdout, done.stderr))
    return {"exit": done.returncode, "out": out, "err": err}


def _plain(text: str, timed: bool) -> str:
    """Return ``text`` without paths of this machine, times of day, sizes of what is free, and
    progress; of a command that measures times, without numbers that are no counts.
    """
    lines = []
    for line in models.without_paths(text).replace(str(Path.home()), "~").splitlines():
        if re.match(r"(capacity: )?\d+ of \d+ requests", line):
            continue
        if "available" in line or " free" in line:
            line = re.sub(r"[\d,.]+ (?=[KMG]iB|sequences|tokens)", "… ", line)
        if timed:
            line = re.sub(r"-?\d+([.,]\d+)? ms|-?\d+\.\d+", "…", line)
        lines.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "…", line))
    return "\n".join(lines)
