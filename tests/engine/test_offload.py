"""Connectors of a loaded engine: the same bits wherever blocks come from, also in another process,
and no block of another model, tokenizer, rounding or numerics version.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import octavo.loader
from engine.answering import answers
from executor import tiny
from octavo.engine import offload
from octavo.engine.cache_plan import plan_cache
from octavo.engine.config import DoesNotFit, EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import WeightFormat
from octavo.models.families import program
from paths import ORACLE, TINY

MIB = 1 << 20


def elsewhere(**asked: Any) -> list[dict[str, Any]]:
    """`answers` in a process of its own."""
    script = Path(__file__).parent / "answering.py"
    ran = subprocess.run(
        [sys.executable, str(script), json.dumps(asked)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def small_pool(path: Path, length: int) -> int:
    """Bytes of a pool that holds one sequence."""
    layout = KvLayout.of(octavo.loader.load(path).config)
    return peak_blocks(layout, length) * layout.block_bytes


def check_all_tiers(path: Path, folder: Path, prompt: list[int], others: list[list[int]]) -> None:
    """``others`` overwrite the pool when they are asked."""
    length = max(map(len, [prompt, *others])) + 16
    config = {
        "kv_cache_memory_bytes": small_pool(path, length),
        "max_model_len": length,
        "max_num_seqs": 4,
        "threads": 2,
        "kv_offload_memory": 256 * MIB,
    }
    full = len(prompt) // 16 * 16
    alone = {**config, "kv_offload_memory": None, "enable_prefix_caching": False, "threads": 1}
    (cold,) = answers(str(path), alone, [prompt])
    first, *_, host = answers(str(path), config, [prompt, *others, prompt])
    assert same(first, cold)
    assert (first["cached"], host["cached"], host["host"]) == (0, full, full)
    assert same(host, cold)
    disk = config | {"kv_offload_dir": str(folder)}
    first, *_ = elsewhere(model=str(path), config=disk, prompts=[prompt])
    assert same(first, cold)
    warm, *_, again = elsewhere(model=str(path), config=disk, prompts=[prompt, *others, prompt])
    assert (warm["cached"], warm["disk"]) == (full, full)
    assert same(warm, cold)
    assert (again["cached"], again["disk"]) == (full, 0)
    assert same(again, cold)


def text(number: int, length: int, vocab: int) -> list[int]:
    return [(number * 31 + at * 7 + at * at) % vocab for at in range(length)]


def test_smollm2_from_every_tier(smollm2_path: Path, tmp_path: Path) -> None:
    prompt, *others = (text(number, 330, 40_000) for number in range(3))
    check_all_tiers(smollm2_path, tmp_path, prompt, others)


@pytest.mark.long
def test_gemma3_beyond_its_window_from_every_tier(gemma3_path: Path, tmp_path: Path) -> None:
    prompt, *others = (text(number, 900, 200_000) for number in range(3))
    check_all_tiers(gemma3_path, tmp_path, prompt, others)


# What shares and what does not


def cached_by(path: Path, folder: Path, **config: Any) -> int:
    """How many tokens of the prompt are found."""
    given = {
        "kv_cache_memory_bytes": 8 * MIB,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "threads": 1,
        "kv_offload_dir": str(folder),
        "kv_offload_memory": 8 * MIB,
    } | config
    (found,) = answers(str(path), given, [text(1, 100, 90)])
    assert not found["corrupted"]
    return int(found["cached"])


def test_who_shares(tmp_path: Path) -> None:
    model, folder = TINY, tmp_path / "cache"
    assert cached_by(model, folder) == 0
    assert cached_by(model, folder) == 96
    # The same numbers, however they come about:
    assert cached_by(model, folder, threads=2, max_num_batched_tokens=7) == 96
    moved = tmp_path / "moved.gguf"
    shutil.copy(model, moved)
    assert cached_by(moved, folder) == 96
    # And other ones:
    for name, value in (
        ("kv_cache_dtype", "int8"),
        ("block_size", 32),
        ("quantization", "int8"),
        ("isa", "generic"),
    ):
        assert cached_by(model, folder, **{name: value}) == 0
    for other in ("tiny-llama-odd", "tiny-gemma3"):
        assert cached_by(ORACLE / f"{other}.gguf", folder) == 0
    assert cached_by(model, folder) == 96


def test_one_weight_that_differs(tmp_path: Path) -> None:
    model, folder = TINY, tmp_path / "cache"
    assert cached_by(model, folder) == 0
    altered = bytearray(model.read_bytes())
    altered[-2] ^= 1  # of the last tensor
    (tmp_path / "altered.gguf").write_bytes(altered)
    assert cached_by(tmp_path / "altered.gguf", folder) == 0


def test_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = TINY, tmp_path / "cache"
    assert cached_by(model, folder) == 0
    with monkeypatch.context() as changed:
        changed.setattr(offload, "_tokenizer_digest", lambda tokenizer: b"another")
        assert cached_by(model, folder) == 0
    assert cached_by(model, folder) == 96


NAMED = """
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from octavo.loader import load
from octavo.engine import offload
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program
checkpoint = load(Path(sys.argv[1]))
config = replace(checkpoint.config, biases=frozenset({"attn_q", "attn_k", "attn_v"}))
able = SimpleNamespace(name="native", tier="generic", numerics=1)
executor = SimpleNamespace(layout=KvLayout.of(config), digest=b"weights", capabilities=able)
print(offload.engine_digest(executor, program(config), checkpoint.tokenizer, None).hex())
"""


def test_the_digest_is_the_same_in_every_process() -> None:
    """Also of a model with biases, which are a set of strings: its order is each process's own."""
    found = set()
    for seed in ("0", "1"):
        ran = subprocess.run(
            [sys.executable, "-c", NAMED, str(TINY)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        assert ran.returncode == 0, ran.stderr
        found.add(ran.stdout)
    assert len(found) == 1


def test_a_tokenizer_is_told_from_another() -> None:
    one = octavo.loader.load(TINY).tokenizer
    other = octavo.loader.load(ORACLE / "tiny-gemma3.gguf").tokenizer
    assert offload._tokenizer_digest(one) == offload._tokenizer_digest(one)
    assert offload._tokenizer_digest(one) != offload._tokenizer_digest(other)
    stop = octavo.loader.load(TINY).tokenizer
    stop.eos_token_ids = frozenset((7,))
    assert offload._tokenizer_digest(stop) != offload._tokenizer_digest(one)


def test_the_digest_names_the_numerics_and_not_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache outlives a release that computes the same bits, whatever changes in its text."""
    model, folder = TINY, tmp_path / "cache"
    assert cached_by(model, folder) == 0
    with monkeypatch.context() as changed:
        changed.setattr(octavo, "__version__", "another")
        changed.setattr(Path, "read_bytes", None)
        assert cached_by(model, folder) == 96
    with monkeypatch.context() as changed:
        able = NativeExecutor.capabilities
        raised = replace(able, numerics=able.numerics + 1)
        changed.setattr(NativeExecutor, "capabilities", raised)
        assert cached_by(model, folder) == 0


# Settings


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    with pytest.raises(SettingsError, match=r"kv_offload_dir .*/file/cache: may not be written"):
        load_engine(tmp_path / "no-model.gguf", EngineConfig(kv_offload_dir=str(folder)))


@pytest.mark.parametrize("inside", ["link", "file"])
def test_what_lies_in_the_place_of_its_own_folder_is_refused(tmp_path: Path, inside: str) -> None:
    place = tmp_path / "octavo-kv-1"
    if inside == "link":
        place.symlink_to(tmp_path)
    else:
        place.write_bytes(b"")
    config = EngineConfig(
        kv_cache_memory_bytes=8 * MIB, max_num_seqs=4, kv_offload_dir=str(tmp_path)
    )
    with pytest.raises(SettingsError, match=r"may not be written: .*(a link|Not a dir|exists)"):
        load_engine(TINY, config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_offload_disk": 1 << 30}, "kv_offload_disk is a budget of kv_offload_dir"),
        ({"kv_offload_memory": 0}, "kv_offload_memory is 0, below 1"),
        (
            {"kv_offload_memory": 1 << 30, "enable_prefix_caching": False},
            "which enable_prefix_caching turns off",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**settings)


def test_sizes_below_a_block_are_refused(tmp_path: Path) -> None:
    for settings in (
        {"kv_offload_memory": 10},
        {"kv_offload_dir": str(tmp_path), "kv_offload_disk": 10},
    ):
        config = EngineConfig(kv_cache_memory_bytes=8 * MIB, max_num_seqs=4, **settings)
        with pytest.raises(SettingsError, match="is less than a block of"):
            load_engine(TINY, config)


class Filled:
    """A disk of ``size`` bytes, of which others have ``taken``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
        self.size, self.taken, self._folder = size, 0, folder
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=self.free))

    @property
    def free(self) -> int:
        own = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        return max(0, self.size - self.taken - own)


def test_its_own_files_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the budget is the same at each start, and for each server that shares the folder."""
    filled = Filled(monkeypatch, tmp_path, 10 * MIB)
    first = offload._disk(str(tmp_path), b"one", 100_000, None)
    assert first.budget == 5 * MIB
    for number in range(60):  # more than it may have
        first.write((bytes([number]) * 32, 0), np.full(100_000, number, np.uint8))
    assert 40 * 100_000 < first.used <= 5 * MIB
    for engine in (b"one", b"other"):
        again = offload._disk(str(tmp_path), engine, 100_000, None)
        assert again.budget == 5 * MIB
        assert again.used == first.used
    filled.taken = 2 * MIB
    less = offload._disk(str(tmp_path), b"one", 100_000, None)
    assert less.budget == 4 * MIB
    assert len(less) == len(first)  # none is thrown away before another is written


def test_on_a_full_disk_what_is_there_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = Filled(monkeypatch, tmp_path, 0)
    config = EngineConfig(
        kv_cache_memory_bytes=8 * MIB, max_num_seqs=4, kv_offload_dir=str(tmp_path)
    )
    loaded = load_engine(TINY, config)
    assert "is full (0 B free)" in caplog.text
    assert "0 B in" in loaded.report()
    loaded.engine.close()
    full.size = 2 * MIB
    disk = offload._disk(str(tmp_path), b"one", 100_000, None)
    key = b"k" * 32, 0
    data = np.arange(100_000, dtype=np.uint8)
    disk.write(key, data)
    full.size = 0
    disk = offload._disk(str(tmp_path), b"two", 1_000_000, None)
    assert disk is not None  # another model's blocks, for which there is no room
    disk.write((b"l" * 32, 0), np.zeros(1_000_000, np.uint8))
    assert len(disk) == 0
    again = offload._disk(str(tmp_path), b"one", 100_000, None)
    read = np.zeros_like(data)
    assert again.read(key, read)
    assert np.array_equal(read, data)


def test_a_disk_without_room_for_folders_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", full)
    config = EngineConfig(
        kv_cache_memory_bytes=8 * MIB, max_num_seqs=4, kv_offload_dir=str(tmp_path / "kv")
    )
    loaded = load_engine(TINY, config)
    assert "No space left on device: nothing is kept there" in caplog.text
    assert "in /" not in next(line for line in loaded.report().splitlines() if "offload" in line)
    loaded.engine.close()


def test_the_memory_of_the_tier_is_in_the_plan() -> None:
    model = tiny.config()
    compute, layout = program(model), KvLayout.of(model)
    weights, available = 1 * MIB, 900 * MIB
    without = plan_cache(EngineConfig(), compute, layout, weights, available)
    config = EngineConfig(kv_offload_memory=100 * MIB)
    with_it = plan_cache(config, compute, layout, weights, available)
    fewer = (without.num_blocks - with_it.num_blocks) * layout.block_bytes
    assert fewer == pytest.approx(50 * MIB, abs=2 * layout.block_bytes)  # half of what is left
    with pytest.raises(DoesNotFit, match="- 1 GiB kv offload ="):
        plan_cache(replace(config, kv_offload_memory=1 << 30), compute, layout, weights, available)


def test_the_start_report_says_what_there_is(tmp_path: Path) -> None:
    cached_by(TINY, tmp_path)
    config = EngineConfig(
        kv_cache_memory_bytes=8 * MIB,
        max_model_len=128,
        max_num_seqs=4,
        kv_offload_dir=str(tmp_path),
        kv_offload_disk=1 << 30,
        kv_offload_memory=8 * MIB,
    )
    loaded = load_engine(TINY, config)
    (line,) = [line for line in loaded.report().splitlines() if line.startswith("kv offload")]
    assert "8 MiB of host memory, 1 GiB in" in line
    assert "which holds 6 blocks of this model" in line
    loaded.engine.close()


def test_formats_are_named_in_the_digest() -> None:
    """Equal bytes in another format are other weights."""

    def digest(format: WeightFormat) -> bytes:
        checkpoint = tiny.checkpoint(tiny.config(), format)
        executor = NativeExecutor(
            checkpoint,
            program(checkpoint.config),
            KvLayout.of(checkpoint.config),
            num_blocks=4,
            max_tokens=16,
            max_logits_rows=4,
            max_seqs=2,
            max_blocks_per_seq=2,
            threads=1,
            digest=True,
        )
        found = executor.digest
        executor.close()
        return found

    assert digest(WeightFormat.BF16) == digest(WeightFormat.BF16)
    assert digest(WeightFormat.BF16) != digest(WeightFormat.F16)
