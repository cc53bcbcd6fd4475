import contextlib
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tools.bench.load.vocabulary import Ids, Words
from octavo.tools.workload import datasets
from octavo.tools.workload.datasets import (
    PREFIXES,
    SUFFIXES,
    UNIT,
    DatasetError,
    Part,
    _kept,
    custom,
    draws,
    prefix_repetition,
    random_prompts,
    sharegpt,
    take,
)
from octavo.tools.workload.traces import Window, load

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109

2023-11-16 18:16:06.6805900,10,0
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def mooncake(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def line(at: float, prompt: int, output: int, ids: list[int]) -> dict[str, Any]:
    return {
        "timestamp": at, "input_length": prompt, "output_length": output, "hash_ids": ids,
    }  # fmt: skip


def test_azure(tmp_path: Path) -> None:
    samples, notices = load(write(tmp_path, AZURE), None, Window())
    assert [(s.prompt_len, s.output_len) for s in samples] == [(374, 44), (396, 109), (10, 1)]
    assert [s.arrival for s in samples] == pytest.approx([0.0, 4.314579, 20.0])
    assert notices == [
        "trace trace: 3 requests, read as azure",
        "1 answers of no token raised to 1",
    ]
    prompts = [Ids(range(1000)).prompt(s, 0) for s in samples]
    assert [len(prompt) for prompt in prompts] == [374, 396, 10]
    assert prompts[0][:10] != prompts[1][:10] != prompts[2]


def test_azure_columns_may_stand_in_another_order_and_times_have_zones(tmp_path: Path) -> None:
    text = (
        "GeneratedTokens,extra,TIMESTAMP,ContextTokens\r\n"
        "7,x,2024-05-12 00:00:01.5+00:00,9\r\n"
        '"8",y,"2024-05-12 00:00:00+00:00",10\r\n'
    )
    samples, notices = load(write(tmp_path, text), "azure", Window())
    assert [(s.arrival, s.prompt_len, s.output_len) for s in samples] == [(0, 10, 8), (1.5, 9, 7)]
    assert "sorted" in notices[1]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Australia/Lord_Howe"])
def test_times_without_a_zone_are_the_same_everywhere(
    zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2023-11-05 and 2023-04-02 clocks in these zones went back."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for day in ("2023-11-05", "2023-04-02", "2023-03-12"):
            hours = "".join(f"{day} {hour:02}:30:00,3,5\n" for hour in range(6))
            path = write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + hours)
            samples, notices = load(path, None, Window(), strict=True)
            assert [sample.arrival for sample in samples] == [3600.0 * hour for hour in range(6)]
            assert len(notices) == 1
    finally:
        monkeypatch.undo()
        time.tzset()


def test_window_speed_and_limits(tmp_path: Path) -> None:
    window = Window(start=4, duration=20, speedup=2, max_input_len=100, max_output_len=50)
    samples, notices = load(write(tmp_path, AZURE), "azure", window)
    assert [s.arrival for s in samples] == pytest.approx([0.1572895, 8.0])
    assert [(s.prompt_len, s.output_len) for s in samples] == [(100, 50), (10, 1)]
    assert "1 of 2 prompts cut to 100 tokens (406 tokens in the trace, 110 asked)" in notices
    assert "1 of 2 answers cut to 50 tokens (109 tokens in the trace, 50 asked)" in notices
    samples, notices = load(write(tmp_path, AZURE), "azure", Window(most=2))
    assert len(samples) == 2
    assert "the first 2 of 3 requests in the window" in notices
    with pytest.raises(DatasetError, match=r"no request in the window; the trace has 20\.0 s"):
        load(write(tmp_path, AZURE), "azure", Window(start=100))


def test_the_window_is_half_open(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(line(0, 1, 1, [1]), line(5000, 1, 1, [2])))
    assert len(load(path, None, Window(duration=5))[0]) == 1
    assert len(load(path, None, Window(start=5, duration=1))[0]) == 1


def test_mooncake_prompts_with_equal_ids_share_those_tokens(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mooncake(
            line(0, 1100, 5, [7, 8, 9]),
            line(10, 1024, 5, [7, 8]),
            line(20, 600, 5, [7, 9]),
            line(30, 0, 5, []),
        ),
    )
    samples, notices = load(path, None, Window())
    assert notices[0].endswith("read as mooncake")
    for vocabulary in (Ids(range(5000)), Words([f"w{i}" for i in range(5000)])):
        texts = [vocabulary.prompt(sample, 3) for sample in samples]
        a, b, c, d = (text if isinstance(text, list) else text.split(" ") for text in texts)
        assert (len(a), len(b), len(c), len(d)) == (1100, 1024, 600, 1)
        assert a[:1024] == b
        assert a[:512] == c[:512]
        assert a[1024:1100] == c[512:588]  # block 9, cut at different places
        assert len(set(map(str, a))) > 900


def test_a_cut_prompt_still_shares_its_prefix(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(line(0, 1500, 5, [1, 2, 3]), line(0, 700, 5, [1, 2])))
    samples, _ = load(path, None, Window(max_input_len=600))
    a, b = (Ids(range(5000)).prompt(sample, 0) for sample in samples)
    assert a == b
    assert len(a) == 600


@pytest.mark.parametrize(
    ("text", "number", "about"),
    [
        ("", None, "is empty"),
        ("\n \n", None, "is empty"),
        ("hello\n", 1, "neither an Azure trace"),
        ("TIMESTAMP,ContextTokens\n", 1, "lacks one of"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", None, "has no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n", 1, "ContextTokens twice"),
        (gzip.compress(AZURE.encode()), None, "is compressed"),
        (AZURE.encode("utf-16"), 1, "not UTF-8"),
        ('{"timestamp": 0, "timestamp": 1}', 1, "'timestamp' appears twice"),
        (AZURE + "2023-11-16 18:16:06,1\n", 6, "2 fields where the header has 3"),
        (AZURE + "yesterday,1,1\n", 6, "TIMESTAMP is 'yesterday', not a time"),
        (AZURE + "2023-13-16 18:16:06,1,1\n", 6, "not a time"),
        (AZURE + "2023-11-16 18:16:06,-1,1\n", 6, "ContextTokens is '-1'"),
        (AZURE + "2023-11-16 18:16:06,1,1.5\n", 6, "GeneratedTokens is '1.5'"),
        (AZURE + "2023-11-16 18:16:06,1,٣\n", 6, "GeneratedTokens is '٣'"),
        (AZURE + f"2023-11-16 18:16:06,{'9' * 5000},1\n", 6, "ContextTokens is '999"),
        (AZURE + f"2023-11-16 18:16:06,{'0' * 5000},1\n", 6, "ContextTokens is '000"),
        (AZURE + "2023-11-16 18:16:06,1\r2,1\n", 6, "not CSV"),
        (AZURE + f"2023-11-16 18:16:06,{'1' * 140000},1\n", 6, "not CSV"),
        (AZURE.encode() + b"\xff\n", 6, "not UTF-8"),
        ("{\n", 1, "not JSON"),
        ("[" * 10**5, 1, "neither an Azure trace"),
        ('{"a":' * 10**5, 1, "JSON"),
        (mooncake(line(0, 1, 1, [1])) + "[]\n", 2, "not a JSON object"),
        (mooncake(line(0, 1, 1, [1])) + "\n{}\n", 3, "timestamp is None"),
        (mooncake(line(-1, 1, 1, [1])), 1, "timestamp is -1"),
        (mooncake(line(float("nan"), 1, 1, [1])), 1, "timestamp is nan"),
        (mooncake(line(float("inf"), 1, 1, [1])), 1, "timestamp is inf"),
        (mooncake(line(True, 1, 1, [1])), 1, "timestamp is True"),
        (mooncake(line(0, -5, 1, [1])), 1, "input_length is -5"),
        (mooncake(line(0, 1, 1.5, [1])), 1, "output_length is 1.5"),  # type: ignore[arg-type]
        (mooncake(line(0, 10**12, 1, [1])), 1, "input_length is 1000000000000"),
        (mooncake(line(0, 513, 1, [1])), 1, "1 hash_ids, but 513 tokens are 2 blocks of 512"),
        (mooncake(line(0, 5, 1, [1, 2])), 1, "2 hash_ids, but 5 tokens are 1 blocks"),
        (mooncake(line(0, 5, 1, ["a"])), 1, "hash_ids is not a list of ids"),  # type: ignore[list-item]
        (mooncake(line(0, 5, 1, [-1])), 1, "hash_ids is not a list of ids"),
    ],
)
def test_a_broken_file_is_refused_with_the_line(
    tmp_path: Path, text: str | bytes, number: int | None, about: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(DatasetError) as caught:
        load(path, None, Window())
    assert about in str(caught.value)
    assert str(caught.value).startswith(f"{path}:" + (f"{number}:" if number else ""))
    assert len(str(caught.value)) < 500


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    for text in (junk, AZURE.encode() + junk, mooncake(line(0, 1, 1, [1])).encode() + junk):
        with contextlib.suppress(DatasetError):
            load(write(folder, text), None, Window())


@pytest.mark.parametrize(
    ("window", "about"),
    [
        (Window(speedup=0), "speedup"),
        (Window(speedup=float("inf")), "speedup"),
        (Window(start=-1), "start"),
        (Window(duration=0), "duration"),
        (Window(duration=float("nan")), "duration"),
    ],
)
def test_a_wrong_window_is_refused(tmp_path: Path, window: Window, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        load(write(tmp_path, AZURE), None, window)


# --- synthetic prompts ---------------------------------------------------------------------------


@given(
    mean=st.integers(1, 500), output=st.integers(1, 100), ratio=st.floats(0, 0.99),
    prefix=st.integers(1, 50), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_lengths_stay_in_their_range(
    mean: int, output: int, ratio: float, prefix: int, seed: int
) -> None:
    samples = random_prompts(
        20, input_len=mean, output_len=output, range_ratio=ratio, prefix_len=prefix, seed=seed
    )
    ids = Ids(range(30000))
    shared = ids.prompt(samples[0], seed)[:prefix]
    for sample in samples:
        own = sample.prompt_len - prefix
        assert int(mean * (1 - ratio)) <= own <= -int(-mean * (1 + ratio) // 1)
        assert max(1, int(output * (1 - ratio))) <= sample.output_len
        prompt = ids.prompt(sample, seed)
        assert len(prompt) == sample.prompt_len
        assert prompt[:prefix] == shared


def test_random_prompts_differ_from_each_other_and_by_seed() -> None:
    samples = random_prompts(3, input_len=32, output_len=4, range_ratio=0, prefix_len=0, seed=0)
    prompts = [tuple(Ids(range(30000)).prompt(s, seed)) for s in samples for seed in (0, 1)]
    assert len(set(prompts)) == 6


def test_an_empty_prompt_is_refused() -> None:
    for length, ratio in ((0, 0.0), (1, 0.5)):
        with pytest.raises(ValueError, match="could be empty"):
            random_prompts(
                1, input_len=length, output_len=1, range_ratio=ratio, prefix_len=0, seed=0
            )
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        random_prompts(1, input_len=9, output_len=1, range_ratio=1.0, prefix_len=0, seed=0)


def test_prefix_repetition() -> None:
    arguments = {"prefix_len": 40, "suffix_len": 8, "num_prefixes": 3, "output_len": 5}
    samples = prefix_repetition(11, **arguments, seed=0)
    assert len(samples) == 9
    prompts = [tuple(Ids(range(30000)).prompt(sample, 0)) for sample in samples]
    assert len(set(prompts)) == 9
    assert sorted(prompts.count(p) for p in prompts) == [1] * 9
    prefixes = [prompt[:40] for prompt in prompts]
    assert len(set(prefixes)) == 3
    assert all(prefixes.count(prefix) == 3 for prefix in prefixes)
    assert samples != prefix_repetition(11, **arguments, seed=0, shuffle=False)
    with pytest.raises(ValueError, match="fewer than"):
        prefix_repetition(2, **arguments, seed=0)


@pytest.mark.parametrize("time", [1e308, 1e18, 10**400, 1.01e13])
def test_times_that_would_lose_their_precision_are_refused(tmp_path: Path, time: float) -> None:
    path = write(tmp_path, mooncake(line(0, 1, 1, [1]), line(time, 1, 1, [1])))
    with pytest.raises(DatasetError, match=r"trace:2: timestamp is 1.{0,60}, not milliseconds"):
        load(path, None, Window())
    if time < 1e300:
        time /= 1000
    result = {"start_times": [0, -time], "input_lens": [1, 1], "output_lens": [1, 1]}
    path = write(tmp_path, json.dumps({**result, "errors": ["", ""]}))
    with pytest.raises(DatasetError, match=r"trace: start_times\[1\] is -1.{0,60}, not seconds"):
        load(path, None, Window())


def test_a_year_without_sense_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "9999-11-16 18:16:06,1,1\n")
    with pytest.raises(DatasetError, match=r"trace:6: TIMESTAMP is '9999"):
        load(path, None, Window())


def test_a_speed_that_no_clock_has_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(line(0, 1, 1, [1]), line(1e11, 1, 1, [1])))
    with pytest.raises(ValueError, match="--trace-speedup is from"):
        load(path, None, Window(speedup=1e-308))
    with pytest.raises(DatasetError, match=r"at --trace-speedup 0\.001 the last request comes"):
        load(path, None, Window(speedup=1e-3))


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (lambda p: load(p, None, Window()), lambda p: sharegpt(p, words, None)):
            with pytest.raises(DatasetError, match="is no regular file"):
                read(path)


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_LONGEST_LINE", 99)
    with pytest.raises(DatasetError, match="trace:1: is longer than 99 bytes"):
        load(write(tmp_path, "x" * 100), None, Window())


@given(length=st.integers(1, 512), cut=st.integers(1, 512), key=st.integers(0, 2**63 - 1))
def test_a_shorter_part_is_a_prefix_of_the_longer(length: int, cut: int, key: int) -> None:
    shorter, longer = sorted((length, cut))
    assert (draws(5, key, longer)[:shorter] == draws(5, key, shorter)).all()
    assert draws(5, key, longer).dtype == np.uint32


# --- files of prompts ----------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split())


def test_custom(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a b"}\n\n{"prompt": "c", "output_tokens": 3}\n')
    samples = custom(path, words, 9)
    assert [(s.text, s.prompt_len, s.output_len) for s in samples] == [("a b", 2, 9), ("c", 1, 9)]
    with pytest.raises(DatasetError, match=r"trace:1: has no positive number under output_tokens"):
        custom(path, words, -1)
    for text, about in (
        ("{}", "trace:1: has no text"),
        ('{"prompt": 3}', "trace:1: has no text"),
        ('{"prompt": ""}', "trace:1: has no text"),
        ("\n7", "trace:2: not a JSON object"),
        ("", "has no prompt"),
    ):
        with pytest.raises(DatasetError, match=about):
            custom(write(tmp_path, text), words, 9)
    path = write(tmp_path, '{"prompt": "c", "output_tokens": 3}')
    assert custom(path, words, -1)[0].output_len == 3


def test_a_compressed_sharegpt_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"[]"))
    with pytest.raises(DatasetError, match="is compressed"):
        sharegpt(path, words, None)


def test_sharegpt_leaves_out_what_vllm_leaves_out(tmp_path: Path) -> None:
    def talk(prompt: int, answer: int) -> dict[str, Any]:
        return {"conversations": [{"value": "p " * prompt}, {"value": "a " * answer}]}

    entries = [
        talk(4, 4), talk(3, 9), talk(9, 3), talk(1025, 9), talk(1024, 1025), talk(1024, 1024),
        {}, 3, {"conversations": [{"value": "x"}]}, {"conversations": [1, 2]},
    ]  # fmt: skip
    path = write(tmp_path, json.dumps(entries))
    found = sharegpt(path, words, None)
    assert [(s.prompt_len, s.output_len) for s in found] == [(4, 4), (1024, 1024)]
    assert [s.prompt_len for s in sharegpt(path, words, 7)] == [4, 9, 1024, 1024]
    for text, about in (("x", "not JSON"), ("{}", "not a JSON list"), ("[]", "has no prompt")):
        with pytest.raises(DatasetError, match=about):
            sharegpt(write(tmp_path, text), words, None)


def test_taking_more_than_there_are() -> None:
    samples = prefix_repetition(
        3, prefix_len=1, suffix_len=1, num_prefixes=3, output_len=1, seed=0, shuffle=False
    )
    assert take(samples, 2, seed=0, shuffle=False, oversample=True) == samples[:2]
    assert len(take(samples, 7, seed=0, shuffle=True, oversample=True)) == 7
    assert len(take(samples, 7, seed=0, shuffle=True, oversample=False)) == 3
    assert samples[0].parts == (Part(PREFIXES, 1), Part(SUFFIXES, 1))


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ('{\n\n  "num_prompts": 1,\n  oops\n}\n', ":4: not JSON"),
        ('{\n"num_prompts": 1\n}\n\n{}\n', ":5: not JSON (Extra data): a result is one"),
        (b'{\n"num_prompts": 1,\n"a": "\xff"}\n', ":3: not UTF-8"),
        ("\n \n", ": is empty"),
        ('\n["num_prompts"]', ": not a JSON object"),
        ("[" * 100_000, ": JSON nested too deep"),
        ('{"num_prompts": ' + "1" * 5000 + "}", ": not JSON (Exceeds the limit"),
        ('{"num_prompts": 1, "num_prompts": 2}', ": not JSON ('num_prompts' appears twice"),
    ],
)
def test_what_is_wrong_with_a_result_is_named_by_its_line(
    text: str | bytes, about: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError) as refused:
        load(write(tmp_path, text), "result", Window())
    assert f"trace{about}" in str(refused.value)


def test_draws_that_are_kept_are_few_bytes() -> None:
    """Short parts, which requests share, are drawn once; long ones are not kept."""
    assert draws(0, 1, UNIT) is draws(0, 1, UNIT)
    assert draws(0, 1, 100) is draws(0, 1, 100)
    assert draws(0, 1, UNIT + 1) is not draws(0, 1, UNIT + 1)
    assert draws(0, 1, UNIT + 1)[:100].tolist() == draws(0, 1, 100).tolist()
    kept = _kept.cache_info().maxsize
    assert kept is not None
    assert kept * UNIT * 4 <= 8 << 20
    whole = draws(0, 1, 100).base
    assert whole is None or whole.nbytes == UNIT * 4
