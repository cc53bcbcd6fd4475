"""Programs of some layers: theirs and nothing else, in the places that they had."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import tiny
from octavo.models.families import program
from octavo.models.program import Op, PagedAttention, RopeAndStoreKv
from octavo.models.subset import keep_layers


def stored(ops: tuple[Op, ...]) -> Iterator[int]:
    return (op.layer for op in ops if isinstance(op, RopeAndStoreKv | PagedAttention))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "qwen3moe"])
@given(layers=st.sets(st.integers(0, 2)))
def test_a_subset_has_its_own_layers_and_what_stands_around_them(
    family: str, layers: set[int]
) -> None:
    whole = program(tiny.config(family))
    some = keep_layers(whole, layers)
    prefixes = tuple(f"layers.{layer}." for layer in layers)
    for role in whole.weights:
        wanted = not role.startswith("layers.") or role.startswith(prefixes)
        assert (role in some.weights) == wanted
    assert sorted(stored(some.ops)) == sorted([*layers, *layers])
    # Layers are alike here, so their numbers of ops are.
    ends = len(keep_layers(whole, ()).ops)
    assert len(some.ops) - ends == len(layers) * (len(whole.ops) - ends) // 3
    made: set[str] = set()
    for op in some.ops:
        reads, writes = op.reads, op.writes
        assert made.issuperset(reads)
        made.update(writes)


def test_all_layers_are_the_whole() -> None:
    whole = program(tiny.config("gemma3"))
    assert keep_layers(whole, (2, 0, 1)) == whole


def test_a_layer_needs_the_one_whose_cache_it_shares() -> None:
    whole = program(tiny.mixed())
    assert {
        op.layer for op in keep_layers(whole, (2, 3)).ops if isinstance(op, PagedAttention)
    } == {2}
    with pytest.raises(ValueError, match="layer 3 needs the keys and values of layer 2"):
        keep_layers(whole, (0, 3))


def test_layers_that_are_not_there_are_refused() -> None:
    whole = program(tiny.config())
    with pytest.raises(ValueError, match="layer 3 is outside 0 to 2"):
        keep_layers(whole, (0, 3))
    with pytest.raises(ValueError, match="layer -1 is outside 0 to 2"):
        keep_layers(whole, (-1,))
    with pytest.raises(ValueError, match="a layer is named twice"):
        keep_layers(whole, (1, 1))
