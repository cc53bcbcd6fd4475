"""The log's line about a request that is over, as text or as JSON."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.scheduler.request import RequestRecord, standing
from octavo.server.context import RequestContext

access = logging.getLogger("octavo.access")

Facts = dict[str, object]

_LONGEST_PATH = 256  # characters
_FEW = 8  # items of a list, that are written one by one


def log_access(context: RequestContext, level: int = logging.INFO) -> None:
    """Log the line and, at level debug, the client's labels. Never logs a prompt's text."""
    if not access.isEnabledFor(level):
        return
    facts = facts_of(context)
    head = f"{_plain(context.method)} {_plain(str(facts['path']))} {context.status}"
    access.log(level, "%s", _Line(head, facts), extra={"facts": facts})
    if context.labels:
        access.debug(
            "id=%s labels=%r",
            context.request_id,
            context.labels,
            extra={"facts": {"request_id": context.request_id, "labels": context.labels}},
        )


def facts_of(context: RequestContext) -> Facts:
    """Return all that is known, by the names of the JSON log. Times are in milliseconds.

    For several prompts, tokens are sums, and times are those that the client saw: the first token
    of any, the last end.
    """
    facts: Facts = {
        "request_id": context.request_id,
        "method": context.method,
        "path": _shortened(context.path),
        "status": context.status,
        "answer_id": context.answer_id or None,
        "model": context.model or None,
        "error_type": context.error_type or None,
        "client": context.client or None,
        "trace_id": context.trace_id or None,
        **of_records(context.records, context.ended),
        "duration_ms": _ms(context.ended - context.started),
    }
    return {name: value for name, value in facts.items() if value is not None}


def of_records(records: list[RequestRecord], now: float) -> Facts:
    """Return what records tell. ``now``, in clock seconds, is the time for what has not ended."""
    if not records:
        return {}
    outcomes = [record.outcome.value if record.outcome else "running" for record in records]
    reasons = [reason.value if reason else None for r in records for reason in r.finish_reasons]
    tpots = [record.tpot for record in records if record.tpot]
    return {
        "priority": records[0].scheduling.priority,
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "cached_tokens": sum(record.cached_tokens for record in records),
        "completion_tokens": sum(record.completion_tokens for record in records),
        "outcome": ",".join(sorted(set(outcomes))),
        "finish_reasons": reasons or None,
        "preemptions": sum(record.preemptions for record in records),
        "pauses": sum(record.pauses for record in records) or None,
        "queue_ms": _since(records, min, lambda record: record.scheduled),
        "ttft_ms": _since(records, min, lambda record: record.first_token),
        "tpot_ms": _ms(sum(tpots) / len(tpots)) if tpots else None,
        "e2e_ms": _since(records, max, lambda record: record.finished),
        "slo_met": _met(records, now),
    }


def _met(records: list[RequestRecord], now: float) -> bool | None:
    """Return whether all promises were kept; None: nothing was promised, or the client left before
    that could be said.
    """
    found = {standing(record, now) for record in records} - {None}
    if found & {"missed", "shed"}:
        return False
    return True if found == {"met"} else None


def _since(
    records: list[RequestRecord],
    which: Callable[[Iterable[float]], float],
    when: Callable[[RequestRecord], float | None],
) -> float | None:
    """Return the milliseconds from arrival to ``when``."""
    waited = [at - record.arrival for record in records if (at := when(record)) is not None]
    return _ms(which(waited)) if waited else None


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


# The text's names, where they are shorter; and what its head has said.
_SHORT = {"request_id": "id", "answer_id": "answer", "duration_ms": "ms"} | {
    f"{which}_tokens": which for which in ("prompt", "cached", "completion")
}
_SAID = frozenset({"method", "path", "status"})


class _Line(NamedTuple):
    """Facts as text, made only if somebody writes it: the JSON log does not."""

    head: str
    facts: Facts

    def __str__(self) -> str:
        shown = (
            f"{_SHORT.get(name, name)}={_text(value)}"
            for name, value in self.facts.items()
            if name not in _SAID
        )
        return " ".join((self.head, *shown))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list):
        if len(value) <= _FEW:
            return ",".join(map(str, value))
        return ",".join(f"{each}*{count}" for each, count in Counter(value).items())
    return _plain(str(value)).replace(" ", "_")


def _shortened(path: str) -> str:
    """Return the path, cut so that no client writes a long line into the log."""
    if len(path) <= _LONGEST_PATH:
        return path
    return f"{path[:_LONGEST_PATH]}… ({len(path)} characters)"


def _plain(text: str) -> str:
    """Return what a client sent, without what could break the line or pass for another."""
    return ascii(text)[1:-1]
