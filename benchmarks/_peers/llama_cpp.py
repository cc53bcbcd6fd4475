"""llama.cpp and ik_llama.cpp: ``llama-bench`` for prefill, ``llama-batched-bench`` for decode,
``llama-server``.

Both must be built from source for this machine (``GGML_NATIVE``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from _peers.base import Figure, Peer, Settings, Task, Unavailable, Workload, run
from _peers.watch import Interference


class LlamaCpp(Peer):
    """Settings: ``fa`` flash attention on or off, ``kv`` type of the KV cache."""

    name = "llama.cpp"

    def __init__(self, task: Task, binaries: str) -> None:
        super().__init__(task)
        self._binaries = Path(binaries).resolve()

    def candidates(self, workload: Workload) -> list[Settings]:
        return [{"fa": "on"}, {"fa": "off"}, {"fa": "on", "kv": "q8_0"}]

    def kernel(self, workload: Workload, settings: Settings) -> Figure:
        watch = Interference()
        measure = self._prefill if workload.kind == "prefill" else self._decode
        rate = measure(workload.parallel, settings)
        return Figure(rate, watch.share(), {})

    def server(self, clients: int, settings: Settings) -> Callable[[int], list[str]]:
        per_slot = self.task.input + self.task.output + 16

        def command(port: int) -> list[str]:
            out = [*self._common("llama-server"), *self._flags(settings), "--port", str(port)]
            out += ["--host", "127.0.0.1", "-np", str(clients), "-c", str(clients * per_slot)]
            return [*out, *self._server_flags()]

        return command

    def _prefill(self, count: int, settings: Settings) -> float:
        command = [*self._common("llama-bench"), *self._bench_flags(settings), "-r", "2"]
        command += ["-p", str(self.task.prompt), "-n", "0", "-o", "json"]
        rows = json.loads(run(command).stdout)
        return float(rows[0]["avg_ts"])

    def _decode(self, count: int, settings: Settings) -> float:
        task = self.task
        command = [*self._common("llama-batched-bench"), *self._flags(settings)]
        command += ["-c", str(count * (task.context + task.steps) + 256), "-npl", str(count)]
        return self._decode_rate([*command, "-npp", str(task.context), "-ntg", str(task.steps)])

    def _common(self, program: str) -> list[str]:
        path = self._binaries / program
        if not path.exists():
            raise Unavailable(f"{program} was not built")
        sizes = ["-t", str(self.task.threads), "-b", "512", "-ub", "512"]
        return [str(path), "-m", str(self.task.model), *sizes]

    # What differs between the two projects' programs:

    def _flags(self, settings: Settings) -> list[str]:
        """Settings as llama-batched-bench and llama-server take them."""
        kv = settings.get("kv", "f16")
        return ["-fa", settings["fa"], "-ctk", kv, "-ctv", kv]

    def _bench_flags(self, settings: Settings) -> list[str]:
        """The same as llama-bench takes them."""
        return self._flags({**settings, "fa": "1" if settings["fa"] == "on" else "0"})

    def _server_flags(self) -> list[str]:
        return ["--cache-ram", "0", "--no-cache-prompt", "--no-ui"]

    def _decode_rate(self, command: list[str]) -> float:
        for line in run([*command, "--output-format", "jsonl"]).stdout.splitlines():
            if line.startswith("{"):
                return float(json.loads(line)["speed_tg"])
        raise Unavailable("llama-batched-bench printed no result")


class IkLlamaCpp(LlamaCpp):
    """Settings besides: ``rtr`` run-time repacking of weights into interleaved rows, ``thp``
    transparent huge pages, ``mqkv`` one matrix of Q, K and V."""

    name = "ik_llama.cpp"
    # No cache of a slot's last prompt; and streams, as an answer in one piece fails where its text
    # is not UTF-8, which the random continuations of random prompts often are not.
    request: ClassVar[dict[str, Any]] = {"cache_prompt": False, "stream": True}

    def candidates(self, workload: Workload) -> list[Settings]:
        best = {"fa": "on", "rtr": "on"}
        return [
            {"fa": "on"},
            {"fa": "on", "kv": "q8_0"},
            best,
            {**best, "kv": "q8_0"},
            {"fa": "off", "rtr": "on"},
            {**best, "thp": "on"},
            {**best, "mqkv": "on"},
        ]

    def _flags(self, settings: Settings) -> list[str]:
        flags = super()._flags(settings)
        return flags + [f"-{key}" for key in ("rtr", "thp", "mqkv") if settings.get(key) == "on"]

    def _bench_flags(self, settings: Settings) -> list[str]:
        flags = super()._bench_flags({k: v for k, v in settings.items() if k in ("fa", "kv")})
        for key in ("rtr", "thp", "mqkv"):
            flags += [f"-{key}", "1" if settings.get(key) == "on" else "0"]
        return flags

    def _server_flags(self) -> list[str]:
        return ["--cache-ram", "0", "--ctx-checkpoints", "0"]

    def _decode_rate(self, command: list[str]) -> float:
        """Out of the table in its log: |PP|TG|B|N_KV|T_PP s|S_PP t/s|T_TG s|S_TG t/s|T s|S t/s|."""
        done = run(command)
        for line in (done.stdout + done.stderr).splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) == 10 and re.fullmatch(r"[\d.]+", cells[7]):
                return float(cells[7])
        raise Unavailable("llama-batched-bench printed no result")


def version(binaries: str) -> str:
    """What a build says of itself."""
    try:
        done = run([str(Path(binaries).resolve() / "llama-server"), "--version"])
    except Unavailable as reason:
        return f"unknown: {reason}"
    return " ".join((done.stdout + done.stderr).split())
