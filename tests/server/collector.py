"""An OTLP collector in this process: a tiny HTTP server that decodes what it is sent."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from patience import PATIENCE


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 200  # what it answers
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.resources: list[dict[str, Any]] = []
        self._spans: list[Any] = []
        self._came = threading.Condition()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            self.paths.append(path)
            self.headers.append(headers)
            for resource in request.resource_spans:
                self.resources.append(attributes(resource.resource))
                for scope in resource.scope_spans:
                    self._spans += scope.spans
            self._came.notify_all()

    def spans(self, at_least: int) -> list[Any]:
        """All spans, once so many are there."""
        with self._came:
            come = self._came.wait_for(lambda: len(self._spans) >= at_least, PATIENCE)
            assert come, self._spans
            return list(self._spans)


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in of.attributes}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, which)


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            if collector.status == 200:
                collector.take(self.path, headers, body)
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
