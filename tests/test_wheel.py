"""`make wheel`: the wheel in dist/ is one for all Pythons, and installs and serves without a
compiler.
"""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest

import octavo
from listening import listening
from paths import ROOT

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]  # packages are downloaded

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TIERS = ("generic", "avx2", "avx512", "avx512_bf16")
CAPITAL = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


def find_python(version: str) -> str | None:
    """Return an interpreter of this version: one on the PATH, else one that pyenv installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")):
        # pyenv puts a shim on the PATH also for a version that it then refuses to run.
        asked = python and subprocess.run([python, "-c", "import ensurepip"], capture_output=True)
        if asked and asked.returncode == 0:
            return str(python)
    return None


@pytest.fixture(scope="module")
def wheel() -> Path:
    [wheel] = (ROOT / "dist").glob("*.whl")
    return wheel


def test_the_wheel_is_one_for_all_pythons(wheel: Path) -> None:
    version = re.escape(octavo.__version__)
    name = rf"octavo-{version}-cp311-abi3-manylinux_2_\d+_x86_64\.whl"
    assert re.fullmatch(name, wheel.name)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fresh_environment_installs_and_serves(
    version: str,
    wheel: Path,
    tmp_path: Path,
    smollm2_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here: the wheel was not tried with it")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    bin = tmp_path / "venv/bin"
    monkeypatch.setenv("PATH", str(bin))  # no compiler
    monkeypatch.chdir(tmp_path)  # no octavo of a clone

    def run(name: str, *arguments: str) -> str:
        done = subprocess.run([bin / name, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    start = time.monotonic()
    run("pip", "install", "--quiet", "--only-binary", ":all:", str(wheel))
    install_s = time.monotonic() - start
    assert run("octavo", "--version") == f"octavo {octavo.__version__}\n"
    with pytest.raises(AssertionError, match=f"this build has {', '.join(reversed(TIERS))}"):
        run("octavo", "generate", str(smollm2_path), "x", "--isa", "none")

    start = time.monotonic()
    serve = (str(bin / "octavo"), "serve", str(smollm2_path), "--port", "0")
    with listening(*serve) as (url, _):
        start_s = time.monotonic() - start
        answer = httpx.post(f"{url}/v1/completions", json=CAPITAL).raise_for_status().json()
    text = answer["choices"][0]["text"]
    assert "Paris" in text
    with capsys.disabled():
        print(
            f"\nPython {version}: {wheel.name} installed in {install_s:.1f} s, served SmolLM2 after"
            f" {start_s:.1f} s, answered {CAPITAL['prompt'] + text!r}"
        )
