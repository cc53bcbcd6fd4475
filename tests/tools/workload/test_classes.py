"""Classes of a load: as they are said, and who is of which."""

from collections import Counter

import pytest

from octavo.tools.workload.classes import LoadClass, classed, parse_class, parse_classes
from octavo.tools.workload.datasets import Sample


def test_a_class_is_said_in_a_line() -> None:
    text = "chat:share=0.2,clients=4,weight=2.5,priority=-1,ttft=300,tpot=30"
    limits = {"ttft": 300.0, "tpot": 30.0}
    assert parse_class(text) == LoadClass("chat", 0.2, 4, 2.5, -1, limits)
    assert parse_class("bulk") == LoadClass("bulk", 1.0)
    assert parse_class("bulk:slo=none").limits == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not NAME:KEY=VALUE"),
        ("share=0.2", "is not NAME:KEY=VALUE"),
        ("a:share", "'share' is not KEY=VALUE"),
        ("a:share=1,share=2", "'share=2' is there twice"),
        ("a:share=0", "share is '0', not from"),
        ("a:share=nan", "share is 'nan', not from"),
        ("a:clients=0", "clients is '0', no whole number from 1"),
        ("a:priority=1.5", "priority is '1.5', no whole number"),
        ("a:ttft=-1", "limit must be 0 or more"),
        ("a:slo=fast", "slo is none, or"),
        ("a:slo=none,ttft=3", "slo is none, or"),
        ("a:urgency=3", "'urgency' is none of share, clients"),
    ],
)
def test_what_is_no_class(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_class(text)


def test_two_of_a_name() -> None:
    with pytest.raises(ValueError, match="a is there twice"):
        parse_classes(["a", "b", "a:share=2"])


def test_shares_are_of_requests_and_the_same_for_a_seed() -> None:
    classes = parse_classes(["a:share=3", "b:share=1,clients=5"])
    samples = classed([Sample(1, 1)] * 4000, classes, seed=1)
    names = Counter(sample.kind.name for sample in samples if sample.kind)
    assert names["a"] == pytest.approx(3000, rel=0.05)
    clients = Counter(s.client for s in samples if s.kind is classes[1])
    assert sorted(clients) == [0, 1, 2, 3, 4]
    assert min(clients.values()) > 150
    assert classed([Sample(1, 1)] * 4000, classes, seed=1) == samples
    assert classed([Sample(1, 1)] * 4000, classes, seed=2) != samples
    assert classed([Sample(1, 1)], (), seed=1) == [Sample(1, 1)]
