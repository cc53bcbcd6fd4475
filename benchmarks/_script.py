"""How a benchmark is run as a script: what it lacks is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def as_script(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` and end the process. A file, a program or a package that is not there, and what
    Octavo refuses, are one line on standard error; OCTAVO_DEBUG=1 shows where.
    """
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("OCTAVO_DEBUG") == "1" or not (said := _said(error)):
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: {said}")


def stop(process: subprocess.Popen[Any], seconds: float) -> None:
    """Ask a server to end, and kill it if it has not ended after ``seconds``."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _said(error: Exception) -> str:
    """Empty for what is no lack but a fault."""
    if isinstance(error, OSError) and error.filename:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"needs the package {error.name} (benchmarks/RESULTS.md says which versions)"
    if isinstance(error, subprocess.CalledProcessError):
        return f"{Path(error.cmd[0]).name} ended with {error.returncode}"
    if type(error).__module__.startswith("octavo.") and not isinstance(error, AssertionError):
        return " ".join(str(error).split())
    return ""
