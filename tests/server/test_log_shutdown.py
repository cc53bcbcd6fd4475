"""The log at the end of the process: its last lines are written, and nobody waits for a reader."""

import subprocess
import sys

from patience import PATIENCE

SCRIPT = """
import logging, sys
from octavo.server.logs import set_up_logging
set_up_logging("info")
log = logging.getLogger("octavo")
for number in range({lines}):
    log.info("line %d", number)
logging.shutdown()
"""


def test_a_slow_reader_gets_all_lines() -> None:
    command = [sys.executable, "-c", SCRIPT.format(lines=3000)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = process.stderr.read().splitlines()
    assert process.returncode == 0
    assert [line.rsplit(" ", 1)[1] for line in lines] == [str(number) for number in range(3000)]


def test_the_process_ends_though_nobody_reads() -> None:
    command = [sys.executable, "-c", SCRIPT.format(lines=9000)]  # more than a pipe holds
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()
