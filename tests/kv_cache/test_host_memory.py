"""The connector in host memory: what is evicted, what stays, and its state after a failure."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.kv_cache.block_hash import Key
from octavo.kv_cache.connectors.host import HostMemory


def key(number: int) -> Key:
    return bytes([number]), 0


def filled(memory: HostMemory, number: int) -> None:
    slot = memory.take()
    assert slot is not None
    memory.data[slot] = number
    memory.put(key(number), slot)


def test_the_least_recently_used_is_evicted() -> None:
    memory = HostMemory(2, 8)
    filled(memory, 1)
    filled(memory, 2)
    memory.touch(key(1))
    filled(memory, 3)
    assert [*memory] == [key(1), key(3)]
    assert (memory.row(key(1)) == 1).all()


def test_a_pinned_block_is_not_evicted() -> None:
    memory = HostMemory(2, 8)
    filled(memory, 1)
    filled(memory, 2)
    memory.pin(key(1))
    memory.pin(key(1))
    filled(memory, 3)
    assert key(1) in memory
    memory.pin(key(3))
    assert memory.take() is None
    memory.unpin(key(1))
    assert memory.take() is None
    memory.unpin(key(1))
    assert memory.take() == 0


def test_a_block_that_came_twice_is_kept_once() -> None:
    memory = HostMemory(2, 8)
    filled(memory, 1)
    filled(memory, 1)
    assert len(memory) == 1
    assert memory.num_takeable == 2
    memory.check()


def test_a_block_counts_for_its_origin_until_it_is_used() -> None:
    memory = HostMemory(1, 8)
    slot = memory.take()
    assert slot == 0
    memory.put(key(1), slot, "disk")
    assert memory.origin(key(1)) == "disk"
    memory.used(key(1))
    assert memory.origin(key(1)) == "host"


def test_after_a_failure_nothing_is_pinned_or_lost() -> None:
    memory = HostMemory(3, 8)
    filled(memory, 1)
    memory.pin(key(1))
    lost, reading = memory.take(), memory.take()
    assert lost is not None
    assert reading is not None
    memory.reset({reading})
    memory.check()
    assert not memory.num_pins
    assert memory.num_takeable == 2


def test_a_slot_given_back_twice_is_an_error() -> None:
    memory = HostMemory(2, 8)
    filled(memory, 1)
    with pytest.raises(RuntimeError, match="released more often"):
        memory.give_back(0)


class Slots(RuleBasedStateMachine):
    """Against a dictionary of what each slot was filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = HostMemory(4, 1)
        self.pins: list[Key] = []

    @rule(number=st.integers(0, 9))
    def fill(self, number: int) -> None:
        if self.memory.num_takeable:
            filled(self.memory, number)
        else:
            assert self.memory.take() is None

    @rule()
    def take_in_vain(self) -> None:
        if (slot := self.memory.take()) is not None:
            self.memory.give_back(slot)

    @precondition(lambda self: len(self.memory))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([*self.memory]))
        self.memory.pin(chosen)
        self.pins.append(chosen)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.memory.unpin(self.pins.pop())

    @invariant()
    def right(self) -> None:
        self.memory.check()
        assert self.memory.num_pins == len(self.pins)
        assert all(each in self.memory for each in self.pins)
        for each in self.memory:
            assert self.memory.row(each) == each[0][0]


TestSlots = Slots.TestCase
