"""A result as people read it, laid out as ``vllm bench serve`` prints it."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from octavo.tools.bench.load.load_generator import Run
from octavo.tools.workload.metrics import LATENCIES

_WIDTH = 50

DEFINITIONS = {
    "ttft": "request sent (opening a connection included) to its first event with a token",
    "tpot": "(e2el - ttft) / (output tokens - 1); requests of one token have none",
    "itl": "each gap between two events with a token; an event may carry several",
    "e2el": "request sent to its last event with a token; waiting under --max-concurrency excluded",
    "client_queue_time": "arrival to sending, under --max-concurrency",
    "e2el_including_client_queue": "client_queue_time + e2el",
    "throughput": "of successful requests, over the time from the start to the last answer's end",
    "goodput": "successful requests within every --goodput limit, per second",
    "rejected": "answered 429 or 503 in place of any token; timed to the end of that answer",
    "peak_output": "most events with a token in one second",
    "differs_from_vllm": (
        "a chat answer's opening event with only a role is no token; a stream that ends with "
        "neither [DONE] nor a finish_reason has failed; random tokens are drawn independently "
        "(vLLM: runs of consecutive ids) and sent as ids where the endpoint takes them"
    ),
}


def table(result: Mapping[str, Any], metrics: list[str]) -> str:
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]

    def line(label: str, value: float | str) -> None:
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{label + ':':<40} {text}")

    def section(title: str) -> None:
        lines.append(title.center(_WIDTH, "-"))

    line("Successful requests", result["completed"])
    line("Failed requests", result["failed"])
    if result["rejected"]:
        line("Rejected requests (429 or 503)", result["rejected"])
        line("P99 time to be told so (ms)", result["p99_rejection_ms"])
    if result["interrupted"]:
        line("Unfinished requests (interrupted)", result["unfinished"])
    if result["max_concurrency"] is not None:
        line("Maximum request concurrency", result["max_concurrency"])
    if isinstance(result["request_rate"], float):
        line("Request rate configured (RPS)", result["request_rate"])
    line("Benchmark duration (s)", result["duration"])
    if result["completed"]:
        _figures(result, metrics, line, section)
    lines.append("=" * _WIDTH)
    for what, name in (("Failed", "failures"), ("Rejected", "rejections")):
        for entry in result[name]:
            lines.append(f"{what} {entry['count']} x {entry['reason']}: {entry['example']}")
    lines += [f"Note: {notice}" for notice in result["notices"]]
    if not result["completed"]:
        return "\n".join(lines)
    lines.append("Definitions:")
    shown = [*metrics, "throughput", "peak_output"]
    shown += ["goodput"] if result["request_goodput"] is not None else []
    shown += ["rejected"] if result["rejected"] else []
    for name in [*shown, "differs_from_vllm"]:
        title = (
            LATENCIES[name][0]
            if name in LATENCIES
            else name.replace("_", " ").replace("vllm", "vLLM")
        )
        lines += textwrap.wrap(
            f"{title}: {DEFINITIONS[name]}", 78, initial_indent="  ", subsequent_indent="    "
        )
    return "\n".join(lines)


def _figures(
    result: Mapping[str, Any],
    metrics: list[str],
    line: Callable[[str, float | str], None],
    section: Callable[[str], None],
) -> None:
    """What there is to say of those that were answered, if any were."""
    line("Total input tokens", result["total_input_tokens"])
    if result["total_cached_tokens"] is not None:
        line("Cached input tokens", result["total_cached_tokens"])
    line("Total generated tokens", result["total_output_tokens"])
    line("Request throughput (req/s)", result["request_throughput"])
    if result["request_goodput"] is not None:
        line("Request goodput (req/s)", result["request_goodput"])
    line("Output token throughput (tok/s)", result["output_throughput"])
    line("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    line("Peak concurrent requests", result["max_concurrent_requests"])
    line("Total token throughput (tok/s)", result["total_token_throughput"])
    for name in metrics:
        short, title = LATENCIES[name]
        section(title)
        line(f"Mean {short} (ms)", result[f"mean_{name}_ms"])
        line(f"Median {short} (ms)", result[f"median_{name}_ms"])
        for key, value in result.items():
            if key.startswith("p") and key.endswith(f"_{name}_ms"):
                percentile = key[1:].removesuffix(f"_{name}_ms")
                if percentile.replace(".", "", 1).isdigit():
                    line(f"P{percentile} {short} (ms)", value)
    if "spec_decode_num_drafts" in result:
        section("Speculative Decoding")
        line("Acceptance rate (%)", result["spec_decode_acceptance_rate"])
        line("Acceptance length", result["spec_decode_acceptance_length"])
        line("Drafts", result["spec_decode_num_drafts"])
        line("Draft tokens", result["spec_decode_draft_tokens"])
        line("Accepted tokens", result["spec_decode_accepted_tokens"])
        for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            line(f"Acceptance at position {position} (%)", 100 * rate)
        if "spec_decode_time_saved_s" in result:
            line("Drafting (s)", result["spec_decode_drafting_s"])
            line("Time saved, estimated (s)", result["spec_decode_time_saved_s"])
    section("Load generator")
    lateness = result["lateness"]
    line("Mean lateness (ms)", lateness["mean_ms"])
    line("P99 lateness (ms)", lateness["p99_ms"])
    line("Max lateness (ms)", lateness["max_ms"])
    line("Processor use (% of a core)", result["generator_cpu"] * 100)


class Progress:
    """One line on a terminal that is written over; on anything else nothing."""

    def __init__(self, total: int, *, enabled: bool = True) -> None:
        self._total = total
        self._stream: TextIO = sys.stderr
        self._enabled = enabled and self._stream.isatty()
        self._begin = time.perf_counter()

    def __call__(self, run: Run) -> None:
        if not self._enabled:
            return
        failed = sum(not (record.success or record.rejected) for record in run.records)
        rejected = sum(record.rejected for record in run.records)
        ended = len(run.records)
        text = (
            f"{ended}/{self._total} ended, {run.sent - ended - run.unfinished} in flight"
            + (f", {rejected} rejected" if rejected else "")
            + (f", {failed} failed" if failed else "")
            + f", {(passed := time.perf_counter() - self._begin):.0f} s"
        )
        done = (ended + run.parts) / self._total
        if passed > 1 and 0.02 < done < 1:
            text += f", about {passed * (1 - done) / done:.0f} s to go"
        self._stream.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        self._stream.flush()

    def close(self, run: Run) -> None:
        self(run)
        if self._enabled:
            self._stream.write("\n")
