"""Events of blocks: whoever applies them knows what the prefix index and every connector hold."""

import random
from array import array

import pytest

from engine.connecting import Remote
from engine.world import Setting, World, random_action, random_fault
from octavo.kv_cache.block_hash import Key, after
from octavo.kv_cache.cache import KvCache
from octavo.kv_cache.connectors.disk import Disk
from octavo.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class Replayed:
    """What a subscriber knows: for every medium, the blocks that it holds."""

    def __init__(self, kv: KvCache) -> None:
        self.kv = kv
        self.held: dict[str, set[Key]] = {}
        self.count = 0

    def apply(self, event: Event) -> None:
        self.count += 1
        blocks = self.held.setdefault(event.medium, set())
        match event:
            case BlockStored(block_hash, group, parent, token_ids, block_size):
                assert (block_hash, group) not in blocks
                blocks.add((block_hash, group))
                if event.medium == "device":
                    assert len(token_ids) == block_size == self.kv.block_size
                    if parent is not None:
                        tokens = array("i", token_ids).tobytes()
                        assert block_hash == after(parent, tokens)
            case BlockRemoved(block_hash, group):
                blocks.remove((block_hash, group))
            case AllBlocksCleared():
                blocks.clear()

    def check(self) -> None:
        kv = self.kv
        kv.events.deliver()
        held = {kv._key(node, group) for node, group, _ in kv.index.held()}
        assert self.held.get("device", set()) == held
        for connector in kv.connectors.all if kv.connectors is not None else ():
            match connector:
                case Remote():
                    expected = {*connector.blocks}
                case Disk():
                    expected = {*connector}
                case _:
                    expected = {*connector}  # type: ignore[misc]
            assert self.held.get(connector.name, set()) == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("faults", [0.0, 0.03])
def test_replayed_events_are_the_index(seed: int, faults: float) -> None:
    rng = random.Random(seed)
    setting = Setting.drawn(rng)
    while (
        not setting.enable_prefix_caching
        or setting.max_model_len < 3 * setting.block_size
        or (seed % 2 and not setting.host_blocks)
    ):
        setting = Setting.drawn(rng)
    world = World(setting)
    kv = world.engine.scheduler.kv
    replayed = Replayed(kv)
    kv.subscribe(replayed.apply)
    for _ in range(400):
        if rng.random() < faults:
            random_fault(world, rng)
            world.aim = None  # memory that runs out anywhere may cost an event
        random_action(world, rng)
        replayed.check()
    world.finish()
    replayed.check()
    assert replayed.count


def test_nobody_listens_and_nothing_is_built() -> None:
    world = World(Setting(host_blocks=8))
    world.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=4, seed=1)
    world.finish()
    kv = world.engine.scheduler.kv
    assert not kv.events._events
    assert kv.index.on_change is None


def test_a_subscriber_that_raises_gets_no_more(caplog: pytest.LogCaptureFixture) -> None:
    world = World(Setting())
    kv = world.engine.scheduler.kv
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError(event)

    kv.subscribe(broken)
    kv.subscribe(seen.append)
    for prompt in ([1] * 12, [2] * 12):
        world.submit(prompt, max_tokens=2, seed=1)
        world.finish()
    assert len(seen) >= 6
    assert len([each for each in caplog.records if "subscriber to KV events" in each.message]) == 1
