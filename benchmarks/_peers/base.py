"""What every engine in the comparison can be asked, and what it is asked for."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

Settings = dict[str, str]  # of one engine, by the names of its own options; printed as k=v


class Unavailable(Exception):
    """An engine cannot do what is asked, and why: it is left out by name and with this reason."""


class Workload(NamedTuple):
    """``kind`` is prefill, decode or serve; ``parallel`` its sequences or clients."""

    kind: str
    parallel: int

    @property
    def name(self) -> str:
        return self.kind if self.kind == "prefill" else f"{self.kind}-{self.parallel}"


@dataclass(frozen=True)
class Task:
    """The work that every engine does on a model alike. Lengths are in tokens."""

    model: Path
    vocab: int
    threads: int
    prompt: int  # of a prefill
    context: int  # before the first decode step that counts
    steps: int  # decode steps that count
    sequences: int  # most in a decode
    input: int  # of a served request
    output: int
    requests: int  # that each client sends, one after the other
    stream: bool

    def tokens(self, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Random ones from the middle of the vocabulary, where no special tokens are."""
        return rng.integers(self.vocab // 4, self.vocab * 3 // 4, shape)


class Figure(NamedTuple):
    """``foreign`` is the share of the machine that others used meanwhile, 0 to 1."""

    tokens_per_second: float
    foreign: float
    extra: dict[str, float]


class Peer(ABC):
    """An engine on one model. May keep idle processes between calls, until `close`."""

    name: str
    request: ClassVar[dict[str, Any]] = {}  # fields that its server wants besides OpenAI's

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def candidates(self, workload: Workload) -> list[Settings]:
        """The settings worth trying for this workload; the first is what it does by itself."""

    @abstractmethod
    def kernel(self, workload: Workload, settings: Settings) -> Figure:
        """Tokens/s of a prefill or decode without sampling. Raises `Unavailable`."""

    def server(self, clients: int, settings: Settings) -> Callable[[int], list[str]]:
        """The command that serves on a port, with a slot for each client. Raises `Unavailable`."""
        raise Unavailable("has no HTTP server of its own")

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        pass


def label(settings: Settings) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "default"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, in a folder of its own as some leave logs behind.

    Raises `Unavailable` with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        except OSError as error:
            raise Unavailable(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        said = last_words(done.stderr or done.stdout)
        raise Unavailable(f"{Path(command[0]).name} ended with {done.returncode}: {said}")
    return done


def environment(*paths: str) -> dict[str, str]:
    """This process's, for one in another folder, with folders to import from in front."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [*paths, *(os.path.abspath(path) for path in given if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(absolute)}


def last_words(text: str) -> str:
    """The end of what a program said, from its last mention of a fault on if there is one."""
    said = " ".join(text.split())
    faults = [m.start() for m in re.finditer(r"(?i)error|assert|exception|failed", said)]
    return said[max(0, faults[-1] - 150) :][:400] if faults else said[-400:]
