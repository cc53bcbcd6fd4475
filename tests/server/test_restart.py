"""A live server with a prefix cache on disk is killed and started again: warm, and nothing bad is
served from what lies there.
"""

import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from paths import TINY
from patience import PATIENCE, held_up_until


class Server(NamedTuple):
    child: subprocess.Popen[str]
    url: str
    said: list[str]

    def ask(self, prompt: list[int], **more: Any) -> tuple[str, int, list[Any]]:
        """Text, cached tokens of the prompt, and logprobs."""
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 3,
            "ignore_eos": True,
            **more,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        (choice,) = told["choices"]
        cached = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return choice["text"], cached, choice["logprobs"]["token_logprobs"]

    def counter(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(value) for value in re.findall(rf"(?m)^octavo:{name}\S* (\S+)$", text))


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    # Blocks of so small a model are had as quickly by computing: here they are always worth it.
    code = (
        "from octavo.engine.step_time import StepTimePredictor as P;"
        "P.seconds_alone = lambda *_: 1e6;"
        "from octavo.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "serve", str(model), "--port", "0"]
    command += ["--max-num-seqs", "4", "--kv-cache-memory", "64MiB", "--threads", "2"]
    command += ["--kv-offload-memory", "64MiB", "--kv-offload-dir", str(folder), *flags]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    url = ""
    for line in child.stderr:
        said.append(line)
        if match := re.search(r"listening on (\S+)/v1 ", line):
            url = match[1]
            break
    reader = threading.Thread(target=lambda: said.extend(child.stderr or ()), daemon=True)
    reader.start()
    try:
        assert url, "".join(said)
        yield Server(child, url, said)
    finally:
        child.kill()
        child.wait()
        reader.join(10)


def text(number: int, length: int, vocab: int) -> list[int]:
    return [(number * 31 + at * 7 + at * at) % vocab for at in range(length)]


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*-0") if file.is_file())


def wait_for_files(folder: Path, count: int) -> None:
    held_up_until(lambda: len(files(folder)) >= count, f"{count} blocks on the disk")


def check_restarts(model: Path, folder: Path, prompts: list[list[int]], *flags: str) -> None:
    full = [len(prompt) // 16 * 16 for prompt in prompts]
    with serving(model, folder, *flags) as server:
        cold = [server.ask(prompt) for prompt in prompts]
        assert [cached for _, cached, _ in cold] == [0] * len(prompts)
        wait_for_files(folder, sum(full) // 16)
        server.child.send_signal(signal.SIGKILL)
    with serving(model, folder, *flags) as server:
        warm = [server.ask(prompt) for prompt in prompts]
        assert [cached for _, cached, _ in warm] == full
        assert [each[::2] for each in warm] == [each[::2] for each in cold]
        server.child.send_signal(signal.SIGKILL)
    # Whatever befell the files meanwhile: answers are the same, and what is bad is not used.
    rng = random.Random(1)
    harmed = cut = 0
    for file in files(folder):
        whole = bytearray(file.read_bytes())
        match rng.randrange(6):
            case 0:
                whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            case 1 if not cut:  # of one only, for what lies behind it is not looked at
                cut = 1
                del whole[rng.randrange(len(whole)) :]
            case 2:
                whole[:] = rng.randbytes(len(whole))
            case 3:
                whole[200:] = bytes(len(whole) - 200)
            case _:
                continue
        harmed += 1
        file.write_bytes(whole)
    assert harmed
    with serving(model, folder, *flags) as server:
        again = [server.ask(prompt) for prompt in prompts]
        assert [each[::2] for each in again] == [each[::2] for each in cold]
        assert sum(cached for _, cached, _ in again) < sum(full)
        assert server.counter("kv_offload_corrupted_blocks_total") > 0
        server.child.terminate()
        assert server.child.wait(PATIENCE) == 0
    # Ended in peace, it has written anew what was missing and what it found to be bad. Behind a
    # file that was cut short, and is gone since the start, nothing was read: another does that.
    with serving(model, folder, *flags) as server:
        again = [server.ask(prompt) for prompt in prompts]
        assert [each[::2] for each in again] == [each[::2] for each in cold]
        server.child.terminate()
        assert server.child.wait(PATIENCE) == 0
    with serving(model, folder, *flags) as server:
        healed = [server.ask(prompt) for prompt in prompts]
        assert [cached for _, cached, _ in healed] == full
        assert [each[::2] for each in healed] == [each[::2] for each in cold]


def test_killed_and_started_again(tmp_path: Path) -> None:
    prompts = [text(number, 100, 90) for number in range(3)]
    check_restarts(TINY, tmp_path / "cache", prompts)


@pytest.mark.long
def test_killed_and_started_again_with_a_real_model(smollm2_path: Path, tmp_path: Path) -> None:
    prompts = [text(number, 500, 40_000) for number in range(3)]
    check_restarts(smollm2_path, tmp_path / "cache", prompts)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """While it computes and writes; what is found afterwards is right."""
    prompts = [text(number, 200, 90) for number in range(8)]
    rng = random.Random(3)
    with serving(TINY, tmp_path) as server:
        expected = {}
        for number in (0, 5):
            expected[number] = server.ask(prompts[number], cache_salt="apart")[0]
    for _ in range(2):
        with serving(TINY, tmp_path) as server:
            threads = [
                threading.Thread(target=lambda p=prompt: _try(server, p)) for prompt in prompts
            ]
            for thread in threads:
                thread.start()
            threading.Event().wait(rng.uniform(0.0, 0.3))
            server.child.kill()
            for thread in threads:
                thread.join(PATIENCE)
    with serving(TINY, tmp_path) as server:
        assert {number: server.ask(prompts[number])[0] for number in expected} == expected
        assert server.counter("kv_offload_corrupted_blocks_total") == 0


def _try(server: Server, prompt: list[int]) -> None:
    with suppress(httpx.HTTPError):
        server.ask(prompt)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "from octavo.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(TINY), "--port", "0"]
    command += ["--kv-offload-dir", str(tmp_path / "file" / "cache")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode not in (0, None)
    assert "--kv-offload-dir" in ran.stderr
    assert "may not be written" in ran.stderr
    assert "Traceback" not in ran.stderr
