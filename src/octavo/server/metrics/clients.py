"""Connections, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.server.clients import Clients
from octavo.server.metrics.families import LABELS


class ClientCollector(Collector):
    def __init__(
        self, labels: tuple[str, ...], clients: Clients, unsent: Callable[[], int]
    ) -> None:
        self._labels = labels
        self._clients = clients
        self._unsent = unsent

    def collect(self) -> Iterator[Metric]:
        for name, what, value in (
            ("http_connections", "Connections that are open.", len(self._clients)),
            (
                "unsent_output_bytes",
                "Bytes of output, about, that clients have not read.",
                self._clients.unsent + self._unsent(),
            ),
        ):
            gauge = GaugeMetricFamily(f"octavo:{name}", what, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        closed = CounterMetricFamily(
            "octavo:http_connections_closed",
            "Connections closed on a client: to make room for others (no_room), because it did not "
            "read its answer (not_read), or because all answers unread were too much "
            "(unsent_total).",
            labels=(*LABELS, "reason"),
        )
        for reason, count in self._clients.closed.items():
            closed.add_metric((*self._labels, reason), count)
        yield closed
