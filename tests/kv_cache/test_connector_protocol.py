"""What every KV connector must do, whatever it keeps blocks in."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.connecting import Remote
from octavo.kv_cache.block_hash import Key
from octavo.kv_cache.connectors import NAMES
from octavo.kv_cache.connectors.base import KvConnector
from octavo.kv_cache.connectors.disk import Disk
from octavo.kv_cache.connectors.host import HostMemory
from octavo.kv_cache.events import BlockStored, Event
from patience import PATIENCE

SIZE = 4096
KEYS: list[Key] = [(bytes([number]) * 32, number % 2) for number in range(5)]
MADE: dict[str, Callable[[Path], KvConnector]] = {
    "host": lambda folder: HostMemory(8, SIZE),
    "disk": lambda folder: Disk(folder, b"engine", SIZE, 1 << 20),
    "remote": lambda folder: Remote(losing=0.0),
}


def wait(connector: KvConnector) -> None:
    if isinstance(connector, Remote):
        connector.deliver(True)
    assert connector.arrived.wait(PATIENCE)
    connector.arrived.clear()


@pytest.mark.parametrize("name", MADE)
def test_saved_blocks_are_found_and_loaded(name: str, tmp_path: Path) -> None:
    connector = MADE[name](tmp_path)
    assert connector.name == name
    seen: list[Event] = []
    connector.events.subscribe(seen.append)
    blocks = np.random.default_rng(0).integers(0, 256, (5, SIZE), np.uint8)
    for key, block in zip(KEYS[:4], blocks, strict=False):
        assert not connector.lookup(key)
        connector.start_save_kv(key, block.copy())
    into = np.zeros((5, SIZE), np.uint8)
    loaded, saved = connector.get_finished()
    if isinstance(connector, Disk):
        connector._writer.hurry()
        connector._writer.submit(connector.arrived.set)  # behind the saves
    else:
        connector.arrived.set()
    wait(connector)
    assert sorted(saved) == sorted(KEYS[:4])
    for key, row in zip(KEYS, into, strict=True):
        assert connector.lookup(key) == (key in KEYS[:4])
        connector.start_load_kv(key, row)
    while len(loaded) < 5:
        wait(connector)
    assert {key: ok for key, ok, _ in loaded} == {key: key in KEYS[:4] for key in KEYS}
    assert (into[:4] == blocks[:4]).all()
    connector.events.deliver()
    assert seen == [BlockStored(*key, None, (), 0, name) for key in KEYS[:4]] or name == "remote"
    assert {event.medium for event in seen} == {name}
    connector.flush()
    connector.shutdown()


def test_the_names_of_the_connectors_here() -> None:
    assert (HostMemory.name, Disk.name) == NAMES
