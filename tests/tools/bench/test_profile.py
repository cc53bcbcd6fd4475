"""Whose layer an op and a region is."""

import pytest

from executor import tiny
from octavo.executor.base import RegionTime
from octavo.models.families import program
from octavo.tools.bench.profile import op_layers, region_layers


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_op_has_its_layer(family: str) -> None:
    compute = program(tiny.config(family))
    layers = op_layers(compute)
    inner = [layer for layer in layers if layer is not None]
    assert inner == sorted(inner)
    assert set(inner) == {0, 1, 2}
    assert layers[0] is None, "the embedding"
    assert layers[-2:] == [None, None], "the last norm and the logits"
    assert None not in layers[layers.index(0) : -2]


def test_a_region_is_where_its_first_op_is() -> None:
    compute = program(tiny.config())
    layers = op_layers(compute)
    of_two = layers.index(1) - 1, layers.index(1)
    regions = [
        RegionTime("embed", (0,), 1.0),
        RegionTime("add norm", of_two, 1.0),
        RegionTime("prepare", (), 1.0),
        RegionTime("logits", (len(layers) - 1,), 1.0),
    ]
    assert region_layers(compute, regions) == [None, 0, 0, None]
