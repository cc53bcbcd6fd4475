"""The C++ tests of row-wise kernels, attention, thread pool and sampler (kernels/test/)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def build(test: str, folder: str, *options: str) -> Path:
    directory = ROOT / "build" / folder
    run("cmake", "-S", ROOT, "-B", directory, "-DOCTAVO_TESTS=ON", *options)
    run("cmake", "--build", directory, "--target", test)
    return directory / test


@pytest.mark.parametrize(
    ("test", "rounds"),
    [("kernels_test", "60"), ("thread_pool_test", "100"), ("sampler_test", "300")],
)
def test_cpp(test: str, rounds: str) -> None:
    if not (ROOT / "build" / "dev" / "CMakeCache.txt").exists():
        pytest.skip("the kernels were not built here: make native")
    run(build(test, "dev"), rounds)


@pytest.mark.long
@pytest.mark.parametrize(
    ("test", "rounds"),
    [("kernels_test", "1000"), ("thread_pool_test", "1000"), ("sampler_test", "20000")],
)
def test_cpp_sanitized(test: str, rounds: str) -> None:
    """Address and undefined-behaviour sanitizers; minutes to build."""
    run(build(test, "sanitize", "-G", "Ninja", "-DOCTAVO_SANITIZE=ON"), rounds)


@pytest.mark.long
def test_thread_pool_has_no_races() -> None:
    program = ROOT / "build" / "thread_pool_tsan"
    program.parent.mkdir(exist_ok=True)
    sources = ["kernels/test/thread_pool_test.cpp", "kernels/thread_pool.cpp"]
    flags = ["-std=c++20", "-O2", "-g1", "-fsanitize=thread", "-Ikernels", "-pthread"]
    run("c++", *flags, *sources, "-o", program)
    run(program, "100")
