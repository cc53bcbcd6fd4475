"""The prefix cache on disk: the layout of its files, and whether another tree's are understood."""

from __future__ import annotations

import logging
import re
import shutil
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from _behaviour import models
from _behaviour.tokens import GREEDY, shown

FOLDER = "kept-cache"
_HEADER = struct.Struct("<8s32s32sIQI8x")  # magic, engine, digest, group, length, CRC-32
_MODELS = ("smollm2", "gemma3-270m")  # one group of layers, and two
_DTYPES = ("auto", "int8")


def record(folder: Path, share: float) -> dict[str, Any]:
    """Fill a cache, and describe its files."""
    root = folder / FOLDER
    found: dict[str, Any] = {}
    for model in _MODELS[: None if share == 1 else 1]:
        for dtype in _DTYPES[: None if share == 1 else 1]:
            before = set(_files(root))
            answers, _ = _asked(model, dtype, root)
            made = [path for path in _files(root) if path not in before]
            found[f"{model} {dtype}"] = {"answers": answers, **_layout(root, made)}
    found["modes"] = sorted({f"{path.stat().st_mode & 0o777:o}" for path in root.rglob("*")})
    return found


def _asked(model: str, dtype: str, root: Path) -> tuple[list[Any], list[int]]:
    """Return answers to the same prompts each time, and how much of each prompt was cached."""
    from octavo import LLM, SamplingParams

    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": 32 << 20,
        "max_model_len": 1024,
        "kv_cache_dtype": dtype,
        "kv_offload_dir": str(root),
        "kv_offload_disk": 1 << 30,
    }
    prompts = [text[:900] for text in models.texts()[:2]]
    with LLM(models.make(model, root), **settings) as llm:
        outputs = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    return [shown(each, cached=False) for each in outputs], [o.num_cached_tokens for o in outputs]


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _layout(root: Path, files: list[Path]) -> dict[str, Any]:
    """Return what a reader depends on. Each fact is counted, since all files are to agree."""
    facts: dict[str, Counter[str]] = {}

    def note(name: str, value: object) -> None:
        facts.setdefault(name, Counter())[str(value)] += 1

    for path in files:
        name = str(path.relative_to(root))
        digits = re.sub(r"[0-9a-f]{64}", "<64 hex>", name)
        note(
            "path",
            re.sub(
                r"(?<=/)([0-9a-f]{16}|[0-9a-f]{2})(?=/)", lambda m: f"<{len(m[0])} hex>", digits
            ),
        )
        content = path.read_bytes()
        note("size", len(content))
        magic, engine, digest, group, length, crc = _HEADER.unpack(content[: _HEADER.size])
        data = content[_HEADER.size :]
        note("magic", magic.decode("ascii", "replace"))
        note("padding", content[_HEADER.size - 8 : _HEADER.size].hex())
        note("the folder is the engine's first 8 bytes", f"/{engine.hex()[:16]}/" in name)
        note("the name is digest and group", path.name == f"{digest.hex()}-{group}")
        note("the folder in it is the digest's first byte", path.parent.name == digest.hex()[:2])
        note("the length is the rest's", length == len(data))
        note("the CRC-32 is the rest's", crc == zlib.crc32(data))
    # Writing ends with the engine, so that how many were written depends on the disk.
    return {name: sorted(counted) for name, counted in facts.items()} | {"any": bool(files)}


def read(cache: Path, folder: Path) -> int:
    """Ask with a copy of another tree's cache; print what became of it. 1: it was misread."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("octavo").addHandler(handler)
    wrong = 0
    for model in _MODELS:
        for dtype in _DTYPES:
            expected, _ = _asked(model, dtype, folder / f"empty-{model}-{dtype}")
            copy = folder / f"copy-{model}-{dtype}"
            shutil.copytree(cache, copy)
            before = {str(path.relative_to(copy)) for path in _files(copy)}
            lines.clear()
            answers, cached = _asked(model, dtype, copy)
            after = {str(path.relative_to(copy)) for path in _files(copy)}
            wrong += answers != expected
            print(
                f"{model} {dtype}: {sum(cached)} tokens of prompts were read; answers "
                f"{'DIFFER' if answers != expected else 'are the same'}; {len(before - after)} of "
                f"{len(before)} files were removed, {len(after - before)} written"
            )
            for line in dict.fromkeys(lines):
                print(f"    log: {line}")
    return int(wrong > 0)
