"""A server as a child process, up to the line that says where it listens."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def listening(*command: str) -> Iterator[tuple[str, list[str]]]:
    """(its URL, the lines printed until then); asked to end, it must do so with exit code 0."""
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        match = None
        for line in child.stderr:
            said.append(line)
            if match := re.search(r"listening on (\S+)/v1 ", line):
                break
        assert match, said
        yield match[1], said
        child.terminate()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
