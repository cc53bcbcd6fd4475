"""Recorded arrivals: traces of real services, replayed at their own times.

Two public formats and our own. *Azure* (LLM inference traces, 2023 and 2024; Patel et al.,
Splitwise, ISCA 2024): CSV with TIMESTAMP, ContextTokens, GeneratedTokens. *Mooncake* (Qin et al.,
FAST 2025): JSON lines with timestamp (ms), input_length, output_length and hash_ids, one for each
block of 512 prompt tokens; equal ids mean equal content up to there, so such prompts share those
tokens. A *result* is what ``octavo bench serve --save-result --save-detailed`` writes, as vLLM's
does: the times and lengths of each request; which tokens they shared it does not say.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeGuard

from octavo.strict_json import once
from octavo.tools.workload.arrivals import LATEST
from octavo.tools.workload.datasets import (
    AZURE,
    MOONCAKE,
    RESULT,
    UNIT,
    DatasetError,
    Part,
    Sample,
    json_object,
    numbered_lines,
)

Format = Literal["azure", "mooncake", "result"]
BLOCK = 512  # tokens a hash id of a Mooncake trace stands for
assert BLOCK == UNIT
_LONGEST = 10**8  # a length beyond this is a broken line, not a prompt
_SLOWEST, _FASTEST = 1e-6, 1e9  # speedups


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a trace is replayed, and how.

    ``start`` and ``duration`` are seconds of the trace; at ``speedup`` 2 it runs in half the time.
    """

    start: float = 0.0
    duration: float = math.inf
    speedup: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    most: int | None = None  # requests

    def check(self) -> None:
        if not _SLOWEST <= self.speedup <= _FASTEST:  # nan neither
            raise ValueError(
                f"--trace-speedup is from {_SLOWEST:g} to {_FASTEST:g}, not {self.speedup:g}"
            )
        if not (math.isfinite(self.start) and self.start >= 0):
            raise ValueError(f"--trace-start must be 0 or more seconds, not {self.start:g}")
        if not self.duration > 0:
            raise ValueError(f"--trace-duration must be above 0, not {self.duration:g}")


def load(
    path: Path, kind: Format | None, window: Window, *, strict: bool = False
) -> tuple[list[Sample], list[str]]:
    """The window's requests by arrival, and notices of what was changed.

    ``kind`` None: by the first line. ``strict``: arrivals out of order are an error, not sorted.
    Raises `DatasetError` with the line of what is wrong.
    """
    window.check()
    kind = kind or detect(path)
    notices: list[str] = []
    read = {"azure": _azure, "mooncake": _mooncake, "result": _result}[kind]
    found = read(path, notices)
    samples = list(_ascending(found) if strict else (sample for _, sample in found))
    if not samples:
        raise DatasetError(f"{path}: has no request")
    notices.insert(0, f"trace {path.name}: {len(samples)} requests, read as {kind}")
    times = [_arrival(sample) for sample in samples]
    if times != sorted(times):
        notices.append("the trace is not in order of time: sorted")
        samples.sort(key=_arrival)
    first, last = _arrival(samples[0]), _arrival(samples[-1])
    begin = first + window.start
    kept = [s for s in samples if begin <= _arrival(s) < begin + window.duration]
    if not kept:
        raise DatasetError(f"{path}: no request in the window; the trace has {last - first:.1f} s")
    if window.most is not None and len(kept) > window.most:
        notices.append(f"the first {window.most} of {len(kept)} requests in the window")
        kept = kept[: window.most]
    if (ends := (_arrival(kept[-1]) - begin) / window.speedup) > LATEST:
        raise DatasetError(
            f"{path}: at --trace-speedup {window.speedup:g} the last request comes after "
            f"{ends:.3g} s, beyond {LATEST:g}"
        )
    return _capped(kept, window, begin, notices), notices


def detect(path: Path) -> Format:
    for number, line in numbered_lines(path):
        if line.startswith("{"):
            ours = line == "{" or '"num_prompts"' in line or '"start_times"' in line
            return "result" if ours else "mooncake"
        if "timestamp" in line.lower() and "," in line:
            return "azure"
        raise DatasetError(
            f"{path}:{number}: neither an Azure trace (a CSV header with TIMESTAMP) nor a Mooncake "
            "one (lines of JSON) nor a detailed result of octavo bench serve (JSON)"
        )
    raise DatasetError(f"{path}: is empty")


Found = tuple[str, Sample]  # where in the file, and what


def _ascending(found: Iterable[Found]) -> Iterator[Sample]:
    """Raises `DatasetError` at the first arrival before an earlier one."""
    last = -math.inf
    for where, sample in found:
        if _arrival(sample) < last:
            raise DatasetError(
                f"{where} is {last - _arrival(sample):g} s before the request above: the trace is "
                "not in order of time"
            )
        last = _arrival(sample)
        yield sample


def _arrival(sample: Sample) -> float:
    assert sample.arrival is not None
    return sample.arrival


def _capped(
    samples: list[Sample], window: Window, begin: float, notices: list[str]
) -> list[Sample]:
    """Arrivals from the window's start; lengths within limits, with a notice of how many were."""
    longest_in = window.max_input_len or _LONGEST
    longest_out = window.max_output_len or _LONGEST
    for what, limit, lengths in (
        ("prompts", longest_in, [sample.prompt_len for sample in samples]),
        ("answers", longest_out, [sample.output_len for sample in samples]),
    ):
        if cut := sum(length > limit for length in lengths):
            before, after = sum(lengths), sum(min(length, limit) for length in lengths)
            notices.append(
                f"{cut} of {len(samples)} {what} cut to {limit} tokens ({before} tokens in the "
                f"trace, {after} asked)"
            )
    if none := sum(sample.output_len < 1 for sample in samples):
        notices.append(f"{none} answers of no token raised to 1")
    if none := sum(sample.prompt_len < 1 for sample in samples):
        notices.append(f"{none} empty prompts raised to 1 token")
    return [
        replace(
            sample,
            prompt_len=max(1, min(sample.prompt_len, longest_in)),
            output_len=max(1, min(sample.output_len, longest_out)),
            parts=_cut(sample.parts, min(sample.prompt_len, longest_in)),
            arrival=(_arrival(sample) - begin) / window.speedup,
        )
        for sample in samples
    ]


def _cut(parts: Iterable[Part], length: int) -> tuple[Part, ...]:
    """The first ``length`` tokens, at least one."""
    kept = []
    left = max(1, length)
    for part in parts:
        kept.append(Part(part.key, max(1, min(part.length, left))))
        left -= kept[-1].length
        if left <= 0:
            break
    return tuple(kept)


def _azure(path: Path, notices: list[str]) -> Iterator[Found]:
    columns: dict[str, int] = {}
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    for number, line in numbered_lines(path):
        try:
            fields = [field.strip() for field in next(csv.reader([line]))]
        except csv.Error as error:
            raise DatasetError(f"{path}:{number}: not CSV ({error})") from None
        if not columns:
            columns = {name: fields.index(name) for name in names if name in fields}
            if len(columns) < 3:
                raise DatasetError(f"{path}:{number}: the header lacks one of {', '.join(names)}")
            for name in names:
                if fields.count(name) > 1:
                    raise DatasetError(f"{path}:{number}: the header has {name} twice")
            width = len(fields)
            continue
        if len(fields) != width:
            raise DatasetError(
                f"{path}:{number}: {len(fields)} fields where the header has {width}"
            )
        time, prompt, output = (fields[columns[name]] for name in names)
        try:
            moment = datetime.fromisoformat(time)
            if moment.tzinfo is None:  # the same everywhere, and every hour has 3,600 seconds
                moment = moment.replace(tzinfo=UTC)
            arrival = moment.timestamp()
        except (ValueError, OverflowError):
            raise DatasetError(
                f"{path}:{number}: TIMESTAMP is {_shown(time)}, not a time"
            ) from None
        if abs(arrival) > LATEST:
            raise DatasetError(
                f"{path}:{number}: TIMESTAMP is {_shown(time)}, beyond {LATEST:g} s of 1970"
            )
        lengths = []
        for name, text in zip(names[1:], (prompt, output), strict=True):
            digits = text.isascii() and text.isdigit() and len(text) <= 10
            if not digits or int(text) > _LONGEST:
                raise DatasetError(f"{path}:{number}: {name} is {text[:40]!r}, not a length")
            lengths.append(int(text))
        parts = (Part(AZURE + number, lengths[0]),)
        yield f"{path}:{number}: TIMESTAMP", Sample(lengths[0], lengths[1], parts, arrival=arrival)


def _mooncake(path: Path, notices: list[str]) -> Iterator[Found]:
    for number, line in numbered_lines(path):
        record = json_object(path, number, line)
        time = record.get("timestamp")
        if not _is_number(time) or not 0 <= time <= 1000 * LATEST:
            raise DatasetError(
                f"{path}:{number}: timestamp is {_shown(time)}, not milliseconds up to "
                f"{1000 * LATEST:g}"
            )
        prompt, output = (
            _length(path, number, record, name) for name in ("input_length", "output_length")
        )
        ids = record.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
            raise DatasetError(f"{path}:{number}: hash_ids is not a list of ids")
        if len(ids) != -(-prompt // BLOCK):
            raise DatasetError(
                f"{path}:{number}: {len(ids)} hash_ids, but {prompt} tokens are "
                f"{-(-prompt // BLOCK)} blocks of {BLOCK}"
            )
        parts = [Part(MOONCAKE + key, BLOCK) for key in ids] or [Part(AZURE + number, 1)]
        sample = Sample(prompt, output, _cut(parts, prompt), arrival=time / 1000)
        yield f"{path}:{number}: timestamp", sample


_FIELDS = ("start_times", "input_lens", "output_lens", "errors")


def _result(path: Path, notices: list[str]) -> Iterator[Found]:
    """One JSON object of lists, an item a request. They stand in the order in which requests were
    due, which is not always the one in which they were sent.
    """
    record = _whole_object(path)
    columns: list[list[Any]] = []
    for name in _FIELDS:
        column = record.get(name)
        if not isinstance(column, list):
            raise DatasetError(f"{path}: has no list {name}: write it with --save-detailed")
        columns.append(column)
    if len(set(map(len, columns))) != 1:
        raise DatasetError(f"{path}: {', '.join(_FIELDS)} have not the same number of items")
    failed = 0
    found: list[Found] = []
    for index, (time, prompt, output, why) in enumerate(zip(*columns, strict=True)):
        if why:
            failed += 1
            continue
        where = f"{path}: start_times[{index}]"
        if not _is_number(time) or not -LATEST <= time <= LATEST:
            raise DatasetError(f"{where} is {_shown(time)}, not seconds up to {LATEST:g}")
        for name, value in (("input_lens", prompt), ("output_lens", output)):
            if type(value) is not int or not 0 <= value <= _LONGEST:
                raise DatasetError(f"{path}: {name}[{index}] is {_shown(value)}, not a length")
        sample = Sample(prompt, output, (Part(RESULT + index, prompt),), arrival=float(time))
        found.append((where, sample))
    found.sort(key=lambda item: _arrival(item[1]))
    yield from found
    if failed:
        notices.append(f"{failed} requests that failed have no answer's length: left out")


def _shown(value: object) -> str:
    """What stands there, shortened."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _whole_object(path: Path) -> dict[str, Any]:
    lines: list[str] = []
    for number, line in numbered_lines(path):
        lines += [""] * (number - 1 - len(lines)) + [line]  # blank ones count
    if not lines:
        raise DatasetError(f"{path}: is empty")
    try:
        value = json.loads("\n".join(lines), object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise DatasetError(
            f"{path}:{error.lineno}: not JSON ({error.msg}): a result is one JSON object"
        ) from None
    except ValueError as error:  # a number of thousands of digits, a key given twice
        raise DatasetError(f"{path}: not JSON ({error})") from None
    except RecursionError:
        raise DatasetError(f"{path}: JSON nested too deep") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{path}: not a JSON object, as a result is")
    return value


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)


def _length(path: Path, number: int, record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int or not 0 <= value <= _LONGEST:
        raise DatasetError(f"{path}:{number}: {name} is {_shown(value)}, not a length")
    return value
