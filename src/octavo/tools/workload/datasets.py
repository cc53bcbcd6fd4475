"""What is asked: how long each prompt is, which tokens it shares with others, how long its answer.

A prompt is described, not stored: a list of parts, each a key and a length. Equal keys are equal
tokens, so that a shared prefix is a part that several prompts have; `vocabulary` turns parts into
token ids or into text. Files of real prompts give their text instead.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.strict_json import once
from octavo.tools.workload.classes import LoadClass

# Datasets have keys of their own, so that one run leaves nothing in a server's cache for another.
RANDOM, PREFIXES, SUFFIXES, AZURE, MOONCAKE, RESULT = (kind << 64 for kind in range(1, 7))
_GZIP = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_LONGEST_LINE = 1 << 28  # bytes: one result of octavo bench serve may be a line
UNIT = 512  # tokens are drawn in units of this many, so that a cut part is a prefix of the whole


class Part(NamedTuple):
    key: int
    length: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. ``text`` takes the place of ``parts``; ``arrival`` is in seconds, for traces.

    ``max_tokens`` is what the request allows for an answer that ends by itself after ``output_len``
    tokens; None: just these. ``kind``: its class, where a load has several, and which of that
    class's clients asks.
    """

    prompt_len: int
    output_len: int
    parts: tuple[Part, ...] = ()
    text: str | None = None
    arrival: float | None = None
    max_tokens: int | None = None
    kind: LoadClass | None = None
    client: int = 0


class DatasetError(ValueError):
    """A file that is not what its format says, with the line."""


def draws(seed: int, key: int, length: int) -> npt.NDArray[np.uint32]:
    """[length] random numbers that depend on the seed and the key alone. Short parts, such as the
    blocks that a Mooncake trace shares, are kept: 8 MiB at most.
    """
    return _kept(seed, key, length) if length <= UNIT else _draw(seed, key, length)


def _draw(seed: int, key: int, length: int) -> npt.NDArray[np.uint32]:
    whole = -(-length // UNIT) * UNIT
    drawn = np.random.default_rng((seed, key)).integers(0, 2**32, whole, np.uint32)[:length]
    drawn.flags.writeable = False
    return drawn


_kept = functools.lru_cache(maxsize=4096)(_draw)  # each UNIT · 4 bytes, cut or not


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
    lengths: list[int] = rng.integers(low, high + 1, size=count).tolist()
    return lengths


def random_prompts(
    count: int, *, input_len: int, output_len: int, range_ratio: float, prefix_len: int, seed: int
) -> list[Sample]:
    """Lengths uniform in mean·(1 ± ratio); ``prefix_len`` tokens before each, the same for all."""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio must be in [0, 1), not {range_ratio:g}")
    if prefix_len + math.floor(input_len * (1 - range_ratio)) < 1:
        raise ValueError("--random-input-len is too small: with this range a prompt could be empty")
    rng = np.random.default_rng(seed)
    inputs = _lengths(rng, input_len, range_ratio, count)
    outputs = _lengths(rng, output_len, range_ratio, count)
    return [
        Sample(
            prefix_len + length,
            max(1, output),
            (Part(RANDOM, prefix_len), Part(RANDOM + 1 + index, length)),
        )
        for index, (length, output) in enumerate(zip(inputs, outputs, strict=True))
    ]


def prefix_repetition(
    count: int,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    seed: int,
    shuffle: bool = True,
) -> list[Sample]:
    """``count // num_prefixes`` prompts for each prefix, in random order."""
    each = count // num_prefixes
    if not each:
        raise ValueError(
            f"--num-prompts {count} is fewer than --prefix-repetition-num-prefixes {num_prefixes}"
        )
    if prefix_len + suffix_len < 1:
        raise ValueError("prefix and suffix together must have at least one token")
    samples = [
        Sample(
            prefix_len + suffix_len,
            output_len,
            (
                Part(PREFIXES + prefix, prefix_len),
                Part(SUFFIXES + prefix * each + index, suffix_len),
            ),
        )
        for prefix in range(num_prefixes)
        for index in range(each)
    ]
    if shuffle:
        np.random.default_rng(seed).shuffle(samples)
    return samples


# --- files of real prompts -----------------------------------------------------------------------


def regular(path: Path) -> None:
    """Raises `DatasetError` for a device, a pipe or a folder, whose end may never come."""
    if path.exists() and not path.is_file():
        raise DatasetError(f"{path}: is no regular file")


def _uncompressed(path: Path, begins: bytes) -> None:
    if begins.startswith(_GZIP):
        raise DatasetError(f"{path}: is compressed (gzip -d unpacks it)")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers. Raises `DatasetError` for other bytes."""
    regular(path)
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
            if len(raw) > _LONGEST_LINE:
                raise DatasetError(f"{path}:{number}: is longer than {_LONGEST_LINE:,} bytes")
            if number == 1:
                _uncompressed(path, raw)
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise DatasetError(f"{path}:{number}: not UTF-8 ({error.reason})") from None
            if line:
                yield number, line


def json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=once)
    except ValueError as error:
        raise DatasetError(f"{path}:{number}: not JSON ({error})") from None
    except RecursionError:
        raise DatasetError(f"{path}:{number}: JSON nested too deep") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{path}:{number}: not a JSON object")
    return value


def custom(path: Path, count: Callable[[str], int], output_len: int) -> list[Sample]:
    """vLLM's custom format: lines of JSON with ``prompt``.

    ``output_len`` -1: the line's own ``output_tokens``. ``count`` gives a text's tokens.
    """
    samples = []
    for number, line in numbered_lines(path):
        record = json_object(path, number, line)
        text, wanted = record.get("prompt"), record.get("output_tokens")
        if not isinstance(text, str) or not text:
            raise DatasetError(f"{path}:{number}: has no text under prompt")
        if output_len < 0 and (type(wanted) is not int or wanted < 1):
            raise DatasetError(f"{path}:{number}: has no positive number under output_tokens")
        length = output_len if output_len >= 0 else wanted
        samples.append(Sample(count(text), int(length or 1), text=text))
    return _some(path, samples)


# vLLM leaves out conversations that are too short to say much or too long for small contexts.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


def sharegpt(path: Path, count: Callable[[str], int], output_len: int | None) -> list[Sample]:
    """The first two turns of each conversation: a prompt, and an answer whose length is asked for.

    Conversations are left out as vLLM does: under 4 tokens, prompts over 1024, 2048 in all.
    """
    regular(path)
    content = path.read_bytes()
    _uncompressed(path, content)
    try:
        entries = json.loads(content, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not JSON ({error})") from None
    if not isinstance(entries, list):
        raise DatasetError(f"{path}: not a JSON list")
    samples = []
    for entry in entries:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if not (isinstance(texts[0], str) and isinstance(texts[1], str)):
            continue
        prompt_len = count(texts[0])
        answer_len = count(texts[1]) if output_len is None else output_len
        if prompt_len < _SHORTEST or (output_len is None and answer_len < _SHORTEST):
            continue
        if prompt_len > _LONGEST_PROMPT or prompt_len + answer_len > _LONGEST:
            continue
        samples.append(Sample(prompt_len, answer_len, text=texts[0]))
    return _some(path, samples)


def _some(path: Path, samples: list[Sample]) -> list[Sample]:
    if not samples:
        raise DatasetError(f"{path}: has no prompt that can be used")
    return samples


def take(
    samples: Sequence[Sample], count: int, *, seed: int, shuffle: bool, oversample: bool
) -> list[Sample]:
    """``count`` of them in random order, some again if there are fewer."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(samples)) if shuffle else np.arange(len(samples))
    chosen = [samples[index] for index in order[:count]]
    if oversample and len(chosen) < count:
        again = rng.integers(0, len(samples), count - len(chosen))
        chosen += [samples[index] for index in again]
    return chosen
