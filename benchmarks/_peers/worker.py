"""A process that holds a loaded model and is idle between measurements.

It is asked by a line of JSON on its standard input, a workload, and answers with one on its
standard output, ``{"tokens_per_second": …}``. Its first line, once the model is loaded, is
``{"ready": true}``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _peers.base import Figure, Settings, Task, Unavailable, Workload, environment, last_words
from _peers.watch import Interference

HERE = str(Path(__file__).parent.parent)


class Worker:
    def __init__(self, python: str, module: str, task: Task, settings: Settings) -> None:
        """Runs a module of this package in another Python. Raises `Unavailable`."""
        arguments = [json.dumps(asdict(task), default=str), json.dumps(settings)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment(HERE),
            )
        except OSError as error:
            raise Unavailable(f"{python}: {error.strerror}") from None
        self._read()

    def measure(self, workload: Workload) -> Figure:
        assert self._process.stdin is not None
        try:
            watch = Interference(self._process.pid)
            self._process.stdin.write(json.dumps(workload) + "\n")
            self._process.stdin.flush()
        except (FileNotFoundError, BrokenPipeError):
            raise self._ended() from None
        rate = float(self._read()["tokens_per_second"])
        return Figure(rate, watch.share(), {})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise self._ended()

    def _ended(self) -> Unavailable:
        code = self._process.wait()
        self._errors.seek(0)
        return Unavailable(f"its process ended with {code}: {last_words(self._errors.read())}")


def arguments() -> tuple[Task, Settings]:
    """The other end's: what `Worker` was made with."""
    task = json.loads(sys.argv[1])
    return Task(**{**task, "model": Path(task["model"])}), json.loads(sys.argv[2])


def answer(measure: Callable[[str, int], float]) -> None:
    """The other end: measures what is asked until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        kind, count = json.loads(line)
        print(json.dumps({"tokens_per_second": measure(kind, count)}), flush=True)
