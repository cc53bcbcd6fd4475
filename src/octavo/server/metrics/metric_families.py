"""Metric families with the labels they all have, and labels whose values clients choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LABELS = ("model_name", "engine")

S = TypeVar("S")
# By name: what it is, and its value in S; or a label, and the values by those of the label.
Readings = Mapping[
    str,
    tuple[str, Callable[[S], float]] | tuple[str, Callable[[S], Mapping[str, float]], str],
]


class Families(Collector):
    """Makes families in ``registry``, with their first two labels set."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.labels = (model_name, "0")
        self._registry = registry
        self._sources: list[tuple[Callable[[], Any], dict[Any, Readings[Any]]]] = []
        registry.register(self)

    def _make(self, kind: Any, name: str, what: str, *labels: str, **more: Any) -> Any:
        return kind(f"octavo:{name}", what, (*LABELS, *labels), registry=self._registry, **more)

    def histogram(self, name: str, what: str, buckets: Iterable[float]) -> Any:
        return self._make(Histogram, name, what, buckets=tuple(buckets)).labels(*self.labels)

    def gauge(self, name: str, what: str) -> Any:
        return self._make(Gauge, name, what).labels(*self.labels)

    def counters(self, name: str, what: str, label: str, values: Iterable[str]) -> dict[str, Any]:
        """Return a counter's children for each of the values that ``label`` can have."""
        family = self._make(Counter, name, what, label)
        return {value: family.labels(*self.labels, value) for value in values}

    def open(self, kind: Any, name: str, what: str, *labels: str, most: int, **more: Any) -> Open:
        """Return a family of a ``kind`` (Counter, Histogram) with labels that clients choose."""
        return Open(self._make(kind, name, what, *labels, **more), self.labels, most)

    def read(self, source: Callable[[], S], gauges: Readings[S], counters: Readings[S]) -> None:
        """Read metrics from what ``source`` returns, called once on each scrape."""
        kinds = {GaugeMetricFamily: gauges, CounterMetricFamily: counters}
        self._sources.append((source, kinds))

    def collect(self) -> Iterator[Metric]:
        for source, kinds in self._sources:
            seen = source()
            for kind, readings in kinds.items():
                for name, (what, of, *label) in readings.items():
                    family = kind(f"octavo:{name}", what, labels=(*LABELS, *label))
                    found = of(seen)
                    values = found.items() if isinstance(found, Mapping) else [(None, found)]
                    for value, amount in values:
                        own = () if value is None else (value,)
                        family.add_metric((*self.labels, *own), amount)
                    yield family


class Open:
    """Children of a family by a label whose values clients choose.

    A time series never goes away: so there are ``most`` of them beside those reserved, and the
    values that come later are counted together as "other".
    """

    def __init__(self, family: Any, labels: tuple[str, ...], most: int) -> None:
        self._family = family
        self._labels = labels
        self._most = most
        self._values: set[str] = set()
        self._children: dict[tuple[str, ...], Any] = {}

    def reserve(self, value: str, *series: tuple[str, ...]) -> None:
        """Keep a place for the server's own ``value``, which clients' do not take, and make its
        ``series``: further labels. Before any is counted.
        """
        if value not in self._values:
            self._values.add(value)
            self._most += 1
        for more in series:
            self(value, *more)

    def __call__(self, value: str, *more: str) -> Any:
        """Return the child of ``value``; ``more``: further labels, whose values are few."""
        child = self._children.get((value, *more))
        if child is None:
            if value not in self._values:
                if len(self._values) >= self._most:
                    return self._family.labels(*self._labels, "other", *more)
                self._values.add(value)
            child = self._family.labels(*self._labels, value, *more)
            self._children[value, *more] = child
        return child
