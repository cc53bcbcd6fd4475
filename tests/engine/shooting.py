"""A failure at any place: memory runs out in the n-th call that the engine's own code makes."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import octavo

_ROOT = str(Path(octavo.__file__).parent)
# What picks up the pieces is not shot at: who fails there has nobody left to turn to but the thread
# that runs the engine, which ends (tests/engine/test_async_faults.py).
_SPARED = frozenset(("start_over", "refuse", "_log_once", "check_integrity"))


@cache
def _functions() -> frozenset[str]:
    """Names of the functions of the package."""
    trees = (ast.parse(path.read_text()) for path in Path(_ROOT).rglob("*.py"))
    return frozenset(
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@cache
def _calls(path: str) -> frozenset[int]:
    """Lines of a file in which something is called, and so may fail."""
    text = Path(path).read_text()
    lines = text.splitlines()
    return frozenset(
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        # An observer that raises is a case of its own: here it is what checks.
        and not lines[node.lineno - 1]
        .lstrip()
        .startswith(("observer.on_", "self._log_once(", "logger."))
    )


class Shot:
    """Raises `MemoryError` before the ``line``-th line with a call, counted from the beginning of
    the function ``since`` on; "": from the very beginning.
    """

    def __init__(self, line: int, since: str = "") -> None:
        missing = ({since} - {""} | _SPARED) - _functions()
        assert not missing, f"no function is called {missing}"
        self.hit: tuple[str, int] | None = None  # file and line
        self._left = line
        self._since = since

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT):
            return None
        if code.co_name in _SPARED:
            sys.settrace(None)
            return None
        if self._since:
            if code.co_name != self._since:
                return None
            self._since = ""
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_lineno in _calls(frame.f_code.co_filename):
            self._left -= 1
            if self._left < 0:
                self.hit = frame.f_code.co_filename, frame.f_lineno
                raise MemoryError("injected")  # which ends the tracing, too
        return self._line


@contextmanager
def shooting(aim: tuple[int, str] | None) -> Iterator[Shot | None]:
    """Shoots once at what runs inside (`Shot`); None: not at all."""
    if aim is None:
        yield None
        return
    before = sys.gettrace()
    shot = Shot(*aim)
    sys.settrace(shot.enter)
    try:
        yield shot
    finally:
        sys.settrace(before)
