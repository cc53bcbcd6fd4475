"""Record what a user of Octavo sees, and compare two recordings.

    python benchmarks/behaviour.py record OUT.json [--only tokens,http] [--share 0.1]
    python benchmarks/behaviour.py compare BEFORE.json AFTER.json [--only tokens]
    python benchmarks/behaviour.py read-cache BEFORE.cache

Run `record` with the Python of the tree before a change and with that of the tree after it: the
script uses only what users use (``import octavo``, the command line, HTTP, files), so that one copy
of it records both. The sections are

tokens    tokens, texts and bits of log-probabilities of 400 requests: all model families, KV data
          types, drafters, scheduling policies, cache tiers and sampling parameters
errors    what Python calls raise for settings and parameters that cannot be honoured
http      answers and errors of live servers, their headers, metrics and log fields
commands  every command's flags with types and defaults; output and exit codes of some commands
imports   public names, their parameters, and the imports that the documentation shows
cache     the layout of the prefix cache's files; the files themselves are left in OUT.cache
wording   help texts, descriptions and log lines, which may be rewritten without breaking anybody

`record` replaces sections in OUT.json and leaves the others as they are. Ids, timestamps,
durations, ports, temporary paths and sizes of free memory are replaced by "…" (`_behaviour/http.py`
has the rule for answers). `compare` prints each difference and exits 1 if there is one. `read-
cache` opens the cache of another recording with this tree, in a copy, and says whether its blocks
are used, ignored or misread; it exits 1 if they are misread.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _behaviour import cache, commands, errors, http, imports, tokens
from _script import as_script

Record = dict[str, Any]
# Each takes a folder for temporary files and the share of its cases to record.
SECTIONS: dict[str, Callable[[Path, float], Record]] = {
    "tokens": tokens.record,
    "errors": errors.record,
    "http": http.record,
    "commands": commands.record,
    "imports": imports.record,
    "cache": cache.record,
}
WORDING = "wording"  # the part of a section's record that is under this key goes to that section
_LONGEST = 160  # characters of a value that are shown


def record(names: list[str], share: float, out: Path) -> None:
    """Record sections; those that ``out`` has already are replaced, the others stay."""
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            section = SECTIONS[name](Path(folder), share)
            if (made := Path(folder) / cache.FOLDER).is_dir():
                kept = out.with_suffix(".cache")
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(made, kept)
        # Read now: sections may be recorded by several processes at once.
        found: Record = json.loads(out.read_text("utf-8")) if out.exists() else {}
        found["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
        found.setdefault(WORDING, {})[name] = section.pop(WORDING, {})
        found[name] = section
        out.write_text(json.dumps(found, ensure_ascii=False, indent=0) + "\n", "utf-8")
        seconds = time.monotonic() - began
        print(f"{name}: {len(section)} entries, {seconds:.0f} s", file=sys.stderr, flush=True)


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each leaf that differs, and for each that only one side has.

    Of a list whose items differ only the first is shown, with the number of the others.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            below = f"{path} › {key}" if path else str(key)
            if key not in after:
                yield f"{below}\n    only before: {_shown(before[key])}"
            elif key not in before:
                yield f"{below}\n    only after:  {_shown(after[key])}"
            else:
                yield from differences(before[key], after[key], below)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{path}\n    before: {len(before)} items, after: {len(after)} items"
        apart = [at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        for at in apart[:1]:
            yield from differences(before[at], after[at], f"{path}[{at}]")
        if len(apart) > 1:
            yield f"{path}\n    and {len(apart) - 1} more of {len(before)} items"
    elif before != after or type(before) is not type(after):
        first, second = _shown(before, after), _shown(after, before)
        yield f"{path}\n    before: {first}\n    after:  {second}"


def _shown(value: Any, other: Any = None) -> str:
    """Return ``value`` as JSON, shortened to what is around its first difference from ``other``."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST:
        return text
    against = json.dumps(other, ensure_ascii=False)
    pairs = enumerate(zip(text, against, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), min(len(text), len(against)))
    begin = max(0, min(first - _LONGEST // 2, len(text) - _LONGEST))
    end = begin + _LONGEST
    return "…" * (begin > 0) + text[begin:end] + "…" * (end < len(text))


def compare(before: Path, after: Path, names: list[str]) -> int:
    """Print the differences, section by section; return how many there are."""
    first, second = (json.loads(path.read_text("utf-8")) for path in (before, after))
    if first["machine"] != second["machine"]:
        print(f"recorded on {first['machine']} and on {second['machine']}")
    total = 0
    for name in names:
        if name not in first and name not in second:
            continue
        found = list(differences(first.get(name, {}), second.get(name, {})))
        total += len(found)
        print(f"== {name}: {len(found) or 'no'} difference{'s' * (len(found) != 1)}")
        for line in found:
            print(line)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = ("record", "compare", "read-cache")
    parser.add_argument("command", choices=commands)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--only", help="sections, by commas")
    parser.add_argument(
        "--share", type=float, default=1.0, help="record only the first of the cases"
    )
    given = parser.parse_args()
    known = [*SECTIONS, WORDING]
    names = known if given.only is None else given.only.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))}; the sections are {', '.join(known)}")
    if len(given.paths) != 1 + (given.command == "compare"):
        parser.error("compare takes two paths, record and read-cache take one")
    if given.command == "compare":
        return int(compare(*given.paths, names) > 0)
    if given.command == "read-cache":
        with tempfile.TemporaryDirectory() as folder:
            return cache.read(given.paths[0], Path(folder))
    record([name for name in names if name in SECTIONS], given.share, given.paths[0])
    return 0


if __name__ == "__main__":
    as_script(main)
