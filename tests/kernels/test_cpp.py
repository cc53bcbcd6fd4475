"""The C++ tests of kernels/test/: kernels against scalar references, thread pool, sampler.

Built beside the native module and run; once more under the sanitizers (`make sanitize`).
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from octavo.executor.native.held_form import held_format
from octavo.loader.base import WeightFormat
from paths import ROOT


def run(*command: str | Path) -> str:
    # The environment's own cmake and ninja, as make native takes them.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@cache
def configured(folder: str, *options: str) -> Path:
    directory = ROOT / "build" / folder
    run("cmake", "-S", ROOT, "-B", directory, "-DOCTAVO_TESTS=ON", *options)
    return directory


def build(test: str, folder: str, *options: str) -> Path:
    directory = configured(folder, *options)
    run("cmake", "--build", directory, "--target", test)
    return directory / test


@pytest.mark.parametrize(
    ("test", "rounds"),
    [
        ("linear_test", 4),
        ("kernels_test", 60),
        ("thread_pool_test", 100),
        ("sampler_test", 300),
        ("experts_test", 2000),
    ],
)
def test_cpp(test: str, rounds: int) -> None:
    if not (ROOT / "build" / "dev" / "CMakeCache.txt").exists():
        pytest.skip("the kernels were not built here: make native")
    output = run(build(test, "dev"), str(rounds))
    if test == "linear_test":
        for format in {held_format(format) for format in WeightFormat}:
            assert f"passed generic {format.name}" in output


@pytest.mark.sanitize
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("test", "rounds"),
    [
        ("linear_test", 2),
        ("kernels_test", 40),
        ("thread_pool_test", 100),
        ("sampler_test", 1000),
        ("experts_test", 2000),
    ],
)
def test_cpp_under_address_and_undefined_behaviour_sanitizers(test: str, rounds: int) -> None:
    run(build(test, "sanitize", "-G", "Ninja", "-DOCTAVO_SANITIZE=ON"), str(rounds))


@pytest.mark.sanitize
def test_thread_pool_has_no_races() -> None:
    program = ROOT / "build" / "thread_pool_tsan"
    program.parent.mkdir(exist_ok=True)
    sources = ["kernels/test/thread_pool_test.cpp", "kernels/thread_pool.cpp"]
    flags = ["-std=c++20", "-O2", "-g1", "-fsanitize=thread", "-Ikernels", "-pthread"]
    run("c++", *flags, *sources, "-o", program)
    run(program, "100")
