"""The log's thread: nobody waits for whoever reads the log."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from logging.handlers import QueueHandler
from typing import TextIO

import pytest

from octavo.server.logs import set_up_logging

LOGGERS = ("octavo", "octavo.access", "uvicorn.error", "opentelemetry")


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """Its two ends; the log is as before when the test is over."""
    before = {
        name: (logger.handlers, logger.propagate, logger.level)
        for name in LOGGERS
        for logger in [logging.getLogger(name)]
    }
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        yield read, stream
        for name, (handlers, propagate, level) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        os.close(read)


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_log_that_nobody_reads_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, TextIO], kind: str
) -> None:
    """And whoever reads it at last is told what is missing."""
    monkeypatch.setattr("octavo.server.logs._MOST", 100)
    end, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("info", kind)
    log = logging.getLogger("octavo.server")
    for number in range(2000):  # more than a pipe and the queue hold
        log.info("line %d %s", number, "x" * 100)
    read, dropped, text = 0, 0, ""
    while read + dropped < 2000:
        text += os.read(end, 1 << 16).decode()
        *lines, text = text.split("\n")
        for line in lines:
            said = json.loads(line)["message"] if kind == "json" else line
            if "dropped" in said:
                before, _, _ = said.partition(" lines of this log were dropped")
                dropped += int(before.split()[-1])
            else:
                read += 1
    assert read >= 100
    assert dropped > 0
    assert read + dropped == 2000


def test_what_is_logged_last_is_written(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, TextIO]
) -> None:
    end, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("info")
    handler = logging.getLogger("octavo").handlers[0]
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("octavo.server").exception("at the end")
    handler.flush()
    text = os.read(end, 1 << 16).decode()
    assert " ERROR at the end\nTraceback" in text
    assert text.endswith("RuntimeError: broken\n")


@pytest.mark.usefixtures("pipe")  # for the log as it was before
@pytest.mark.parametrize("closed", [False, True])
def test_a_log_without_a_reader_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], closed: bool
) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("octavo.server.logs._LAST_LINES_S", 20.0)
    if closed:
        stream.close()
    set_up_logging("info")
    handler = logging.getLogger("octavo").handlers[0]
    assert isinstance(handler, QueueHandler)
    for _ in range(3):
        logging.getLogger("octavo.server").info("x")
    handler.flush()
    assert not handler.queue.unfinished_tasks  # type: ignore[union-attr]
    assert capfd.readouterr().err == ""
    with suppress(BrokenPipeError):
        stream.close()
