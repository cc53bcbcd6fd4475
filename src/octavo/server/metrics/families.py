"""Metric families with the labels they all have, and labels whose values clients choose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LABELS = ("model_name", "engine")


class Families:
    """Makes families in ``registry``. What it returns has its first two labels set."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self.labels = (model_name, "0")

    def histogram(self, name: str, what: str, buckets: Iterable[float]) -> Any:
        return Histogram(
            f"octavo:{name}", what, LABELS, buckets=tuple(buckets), registry=self.registry
        ).labels(*self.labels)

    def gauge(self, name: str, what: str) -> Any:
        return Gauge(f"octavo:{name}", what, LABELS, registry=self.registry).labels(*self.labels)

    def counters(self, name: str, what: str, label: str, values: Iterable[str]) -> dict[str, Any]:
        """A counter's children for each of the values that ``label`` can have."""
        family = Counter(f"octavo:{name}", what, (*LABELS, label), registry=self.registry)
        return {value: family.labels(*self.labels, value) for value in values}

    def open_counter(self, name: str, what: str, *labels: str, most: int) -> Open:
        family = Counter(f"octavo:{name}", what, (*LABELS, *labels), registry=self.registry)
        return Open(family, self.labels, most)

    def open_histogram(
        self, name: str, what: str, label: str, buckets: Iterable[float], *, most: int
    ) -> Open:
        family = Histogram(
            f"octavo:{name}",
            what,
            (*LABELS, label),
            buckets=tuple(buckets),
            registry=self.registry,
        )
        return Open(family, self.labels, most)


class Open:
    """Children of a family by a label whose values clients choose: ``most`` of them beside those
    reserved, for a time series never goes away, and those that come later together as "other".
    """

    def __init__(self, family: Any, labels: tuple[str, ...], most: int) -> None:
        self._family = family
        self._labels = labels
        self._most = most
        self._values: set[str] = set()
        self._children: dict[tuple[str, ...], Any] = {}

    def reserve(self, value: str) -> None:
        """The server's own choice, which no client's keeps out. Before any is counted."""
        if value not in self._values:
            self._values.add(value)
            self._most += 1

    def __call__(self, value: str, *more: str) -> Any:
        """The child of ``value``; ``more``: further labels, whose values are few."""
        child = self._children.get((value, *more))
        if child is None:
            if value not in self._values:
                if len(self._values) >= self._most:
                    return self._family.labels(*self._labels, "other", *more)
                self._values.add(value)
            child = self._family.labels(*self._labels, value, *more)
            self._children[value, *more] = child
        return child
