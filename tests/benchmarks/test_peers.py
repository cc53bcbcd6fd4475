"""The comparison with peers: its arithmetic, and what becomes of engines that cannot take part."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import peers
from _peers.base import Figure, Peer, Settings, Task, Unavailable, Workload, label
from _peers.llama_cpp import IkLlamaCpp, LlamaCpp
from _peers.octavo import Octavo
from _peers.results import Sample, summarize, table
from _peers.serving import serve
from _peers.worker import Worker
from loader.gguf_writer import tiny_llama

ENGINES = ("octavo", "a", "b")
PREFILL, DECODE, SERVE = Workload("prefill", 1), Workload("decode", 8), Workload("serve", 16)


def sample(engine: str, index: int, rate: float, foreign: float = 0.0) -> Sample:
    return Sample(engine, "prefill", index, rate, foreign)


def rounds(**rates: list[float]) -> list[Sample]:
    return [
        sample(engine, index, rate)
        for engine, values in rates.items()
        for index, rate in enumerate(values)
    ]


def test_the_ratio_is_to_the_peer_with_the_best_median() -> None:
    row = summarize(rounds(octavo=[30, 20, 25], a=[9, 10, 50], b=[12, 12.5, 11]), ENGINES, 0.05)[
        "prefill"
    ]
    assert (row["octavo"], row["a"], row["b"]) == (25, 10, 12)
    assert row["best_peer"] == "b"
    assert row["ratio_to_best_peer"] == pytest.approx(25 / 12)
    assert (row["ratio_low"], row["ratio_high"]) == (20 / 12.5, 30 / 12)
    assert (row["details"]["a"]["low"], row["details"]["a"]["high"]) == (9, 50)


def test_disturbed_rounds_are_left_out_while_enough_others_remain() -> None:
    calm = [sample("octavo", 0, 10), sample("octavo", 1, 12)]
    row = summarize([*calm, sample("octavo", 2, 3, 0.5)], ENGINES, 0.05)["prefill"]
    assert row["octavo"] == 11
    assert row["details"]["octavo"]["calm"]
    assert row["details"]["octavo"]["rounds"] == 2

    disturbed = [sample("octavo", 1, 4, 0.2), sample("octavo", 2, 3, 0.5)]
    row = summarize([calm[0], *disturbed], ENGINES, 0.05)["prefill"]
    assert row["octavo"] == 4
    assert not row["details"]["octavo"]["calm"]
    assert "*" in table("model", {"prefill": row}, ENGINES)


def test_a_ratio_of_rounds_needs_rounds_that_both_have() -> None:
    ours = [sample("octavo", 0, 10), sample("octavo", 1, 10), sample("octavo", 2, 1, 0.5)]
    theirs = [sample("a", 0, 1, 0.5), sample("a", 1, 4), sample("a", 2, 5)]
    row = summarize([*ours, *theirs], ENGINES, 0.05)["prefill"]
    assert row["ratio_to_best_peer"] == pytest.approx(10 / 4.5)
    assert row["ratio_low"] == row["ratio_high"] == 2.5


def test_without_a_peer_or_without_us_there_is_no_ratio() -> None:
    for samples in (rounds(octavo=[1.0]), rounds(a=[1.0])):
        rows = summarize(samples, ENGINES, 0.05)
        assert rows["prefill"]["ratio_to_best_peer"] is None
        assert rows["prefill"]["b"] is None
        assert table("model", rows, ENGINES).splitlines()[1].split()[-1] == "-"


@given(
    st.dictionaries(
        st.sampled_from(ENGINES), st.lists(st.floats(1, 1e5), min_size=3, max_size=3), min_size=3
    ),
    st.floats(0.01, 100),
)
def test_a_faster_machine_changes_no_ratio(rates: dict[str, list[float]], factor: float) -> None:
    row = summarize(rounds(**rates), ENGINES, 0.05)["prefill"]
    faster = {engine: [factor * x for x in values] for engine, values in rates.items()}
    other = summarize(rounds(**faster), ENGINES, 0.05)["prefill"]
    assert other["ratio_to_best_peer"] == pytest.approx(row["ratio_to_best_peer"])
    best = max(row["details"][engine]["median"] for engine in ("a", "b"))
    assert row["ratio_to_best_peer"] == pytest.approx(row["octavo"] / best)
    assert row["ratio_low"] <= row["ratio_high"]


# --- the run --------------------------------------------------------------------------------------

TASK = Task(
    model=Path("model.gguf"), vocab=1000, threads=2, prompt=512, context=128, steps=32,
    sequences=32, input=128, output=64, requests=2, stream=False,
)  # fmt: skip


class Fake(Peer):
    """Answers from a table of rates by settings; what is not in it cannot be done."""

    def __init__(self, name: str, rates: dict[str, float]) -> None:
        super().__init__(TASK)
        self.name = name
        self.rates = rates
        self.asked: list[tuple[str, str]] = []

    def candidates(self, workload: Workload) -> list[Settings]:
        return [{"fa": "on"}, {"fa": "off"}]

    def kernel(self, workload: Workload, settings: Settings) -> Figure:
        self.asked.append((workload.name, label(settings)))
        if label(settings) not in self.rates:
            raise Unavailable("cannot load the file")
        return Figure(self.rates[label(settings)], 0.0, {})


def comparison(*engines: Peer, **options: Any) -> peers.Comparison:
    defaults = {"quiet": 0.05, "retries": 0}
    return peers.Comparison(list(engines), TASK, argparse.Namespace(**{**defaults, **options}))


def test_the_probe_keeps_the_fastest_settings_that_work() -> None:
    fast, half = Fake("fast", {"fa=on": 5, "fa=off": 9}), Fake("half", {"fa=on": 5})
    it = comparison(fast, half)
    it.probe([PREFILL], {})
    assert it.settings == {"fast": {"prefill": {"fa": "off"}}, "half": {"prefill": {"fa": "on"}}}
    assert fast.asked.count(("prefill", "fa=on")) == 1  # too slow for a second try
    assert fast.asked.count(("prefill", "fa=off")) == 2
    assert not it.left_out


def test_more_sequences_are_probed_with_the_contenders_of_fewer() -> None:
    clear, close = (
        Fake("clear", {"fa=on": 5, "fa=off": 9}),
        Fake("close", {"fa=on": 8, "fa=off": 9}),
    )
    it = comparison(clear, close)
    it.probe([Workload("decode", 1), DECODE, Workload("decode", 32)], {})
    asked = [settings for name, settings in clear.asked if name == "decode-8"]
    assert set(asked) == {"fa=on", "fa=off"}
    assert not [name for name, _ in clear.asked if name == "decode-32"]  # nothing left to choose
    assert it.settings["clear"]["decode-32"] == {"fa": "off"}
    assert {s for name, s in close.asked if name == "decode-32"} == {"fa=on", "fa=off"}


def test_known_settings_are_not_probed() -> None:
    peer = Fake("peer", {"fa=on": 5})
    it = comparison(peer)
    it.probe([PREFILL], {"peer": {"prefill": {"fa": "off"}}})
    assert it.settings["peer"]["prefill"] == {"fa": "off"}
    assert not peer.asked


def test_an_engine_that_cannot_is_left_out_by_name_and_reason() -> None:
    broken, sound = Fake("broken", {}), Fake("sound", {"fa=on": 5, "fa=off": 4})
    it = comparison(broken, sound)
    it.probe([PREFILL, SERVE], {})
    for index in range(2):
        it.round(PREFILL, index)
    assert {(x["engine"], x["workload"]): x["reason"] for x in it.left_out} == {
        ("broken", "prefill"): "cannot load the file",
        ("broken", "serve-16"): "has no HTTP server of its own",
        ("sound", "serve-16"): "has no HTTP server of its own",
    }
    assert [x.engine for x in it.samples] == ["sound", "sound"]


def test_an_engine_that_fails_in_a_round_is_left_out_of_the_later_ones() -> None:
    peer = Fake("peer", {})
    it = comparison(peer)
    it.settings = {"peer": {"prefill": {"fa": "on"}, "decode-8": {"fa": "on"}}}
    for index in range(2):
        it.round(PREFILL, index)
    assert peer.asked == [("prefill", "fa=on")]
    assert [x["workload"] for x in it.left_out] == ["prefill"]
    assert it.settings == {"peer": {"decode-8": {"fa": "on"}}}


def test_rounds_alternate_and_a_disturbed_measurement_is_repeated() -> None:
    class Noisy(Fake):
        shares = iter([0.9, 0.2, 0.01])

        def kernel(self, workload: Workload, settings: Settings) -> Figure:
            order.append(self.name)
            return Figure(1.0, next(self.shares), {})

    order: list[str] = []
    first, second = Noisy("first", {}), Noisy("second", {})
    second.shares = iter([0.0, 0.0])  # type: ignore[misc]
    it = comparison(first, second, retries=2)
    it.settings = {name: {"decode-8": {}} for name in ("first", "second")}
    it.round(DECODE, 0)
    assert order == ["first", "first", "first", "second"]
    assert it.samples[0].foreign == 0.01
    first.shares = iter([0.0])  # type: ignore[misc]
    it.round(DECODE, 1)
    assert order[4:] == ["second", "first"]


def test_programs_that_were_not_built_are_a_reason(tmp_path: Path) -> None:
    for peer in (LlamaCpp(TASK, str(tmp_path)), IkLlamaCpp(TASK, str(tmp_path))):
        for workload in (PREFILL, DECODE):
            with pytest.raises(Unavailable, match="was not built"):
                peer.kernel(workload, peer.candidates(workload)[0])


def test_a_worker_that_dies_says_why(tmp_path: Path) -> None:
    """A file that is none: the worker's process ends, and its last words are the reason."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a GGUF file, but long enough to look at")
    peer = Octavo(Task(**{**TASK.__dict__, "model": broken}))
    with pytest.raises(Unavailable, match="not with the magic"):
        peer.kernel(PREFILL, {})
    peer.close()


def test_a_worker_that_has_died_says_why_each_time(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        """import sys\nprint('{"ready": true}', flush=True)\nsys.exit("error: out of memory")"""
    )
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'dies.py'}\n")
    program.chmod(0o755)
    worker = Worker(str(program), "", TASK, {})
    for _ in range(2):  # asked again, it says so again
        with pytest.raises(Unavailable, match="ended with 1: error: out of memory"):
            worker.measure(PREFILL)
    worker.close()


def test_a_server_that_dies_says_why() -> None:
    """Before it is ready, and in the middle of a load."""
    dies = [sys.executable, "-c", "import sys; print('error: no such model'); sys.exit(3)"]
    with pytest.raises(Unavailable, match="ended with 3: error: no such model"):
        serve(lambda port: dies, TASK, 2, {}, 0)

    crashes = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        print("GGML_ASSERT(S > 0) failed", flush=True)
        os._exit(7)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    with pytest.raises(Unavailable, match=r"ended with 7: .*GGML_ASSERT\(S > 0\) failed"):
        serve(lambda port: [sys.executable, "-c", crashes, str(port)], TASK, 2, {}, 0)


def test_ik_llama_cpps_table_is_read(tmp_path: Path) -> None:
    program = tmp_path / "llama-batched-bench"
    program.write_text(
        "#!/bin/sh\n"
        "echo 'main: n_kv_max = 4096 | n_threads = 2'\n"
        "echo '|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |'\n"  # noqa: E501
        "echo '|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|'\n"  # noqa: E501
        "echo '|   128 |     32 |    8 |   1280 |    1.000 |  1024.00 |    0.500 |   512.25 |    1.500 |   853.33 |'\n"  # noqa: E501
    )
    program.chmod(0o755)
    assert IkLlamaCpp(TASK, str(tmp_path)).kernel(DECODE, {"fa": "on"}).tokens_per_second == 512.25


def test_the_command_measures_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama().write(tmp_path / "tiny.gguf")
    out = tmp_path / "out.json"
    lengths = "--prompt 16 --context 8 --steps 2 --sequences 1 2 --input 8 --output 4 --requests 1"
    command = f"peers.py --model {model} --peers openvino {lengths} --clients 2 --rounds 1"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--json", str(out)])
    assert peers.main() == 0
    assert "openvino is left out: --openvino does not say where it is" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["not_given"] == ["openvino"]
    rows = report["models"]["tiny"]["workloads"]
    assert list(rows) == ["prefill", "decode-1", "decode-2", "serve-2"]
    for row in rows.values():
        assert row["octavo"] > 0
        assert row["ratio_to_best_peer"] is None
    assert report["models"]["tiny"]["left_out"] == []
