"""What benchmarks/server_cost.py counts, of times that are known."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from server_cost import Reader, Round, stretch


def test_only_the_stretch_in_which_all_decode_counts() -> None:
    first = [float(second) for second in range(11)]  # 0 … 10
    second = [3.0 + 0.5 * index for index in range(11)]  # 3 … 8
    # From 3 to 8: five tokens of the first, ten of the second.
    assert stretch([first, second]) == pytest.approx(5.0 / 15 * 1e6)


def test_the_ratio() -> None:
    assert Round(800.0, 840.0, 1.0, 1.0, 1.0).ratio == pytest.approx(1.05)


async def test_a_reader_counts_events_however_they_come() -> None:
    reader = Reader(b"")
    event = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    reader.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    assert reader.times == []
    reader.data_received(event)
    reader.data_received(event * 3)
    assert len(reader.times) == 4
    assert reader.head.startswith(b"HTTP/1.1 200")
    reader.connection_lost(None)
    await asyncio.wait_for(reader.ended, 1)
