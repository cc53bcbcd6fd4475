"""The search finds what trying everything finds, and says how to get it."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.cli import serve as serve_cli
from octavo.cli.options import engine_flags
from octavo.cli.tune import _confirmed_lines, comparison, serve_command
from octavo.engine.cache_plan import CachePlan
from octavo.engine.config import DoesNotFit, EngineConfig, SettingsError
from octavo.executor.cost import Rates
from octavo.tools.plan import confirm, tune_plot
from octavo.tools.plan.frontier import frontier
from octavo.tools.plan.hardware import PUBLISHED, Device
from octavo.tools.plan.load_replay import Replay
from octavo.tools.plan.quantization import as_rounded
from octavo.tools.plan.slo import Figures, Latency, Slo
from octavo.tools.plan.subject import Subject
from octavo.tools.plan.tune import Search, Tuned, busiest
from octavo.tools.plan.tune_space import AS_IT_PAYS, Choice, Space, quantizations, space
from octavo.tools.plan.tune_trial import Trials, TuneTrial, met
from octavo.tools.workload.datasets import Part, Sample, random_prompts
from octavo.tools.workload.metrics import parse_slo
from paths import ORACLE, TINY

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
TOY = Device(
    "a toy",
    lambda _: Rates(1e9, 2e10, step_overhead=1e-3, int8_ops_per_second=4e10),
    memory_bytes=64 << 20,
)
SLO = Slo({"ttft": 200.0, "tpot": 12.0}, 0.9)
AXES: dict[str, tuple[int | float | str, ...]] = {
    "max_num_seqs": (2, 4, 8, 32),
    "max_num_batched_tokens": (16, 64, 256),
    "memory": (0.5,),
    "kv_cache_dtype": ("auto", "int8"),
    "quantization": ("none", "int8"),
    "speculation": ("off",),
}
RATES = (5, 80, 400)
DEFAULT = Choice(32, 64, 0.5, "auto", "none")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def subject(config: Path) -> Subject:
    return Subject.of_config(config)


def load(count: int, rate: float, seed: int = 0) -> list[Sample]:
    prompts = random_prompts(
        count, input_len=100, output_len=10, range_ratio=0.8, prefix_len=0, seed=seed
    )
    return [replace(sample, arrival=i / rate) for i, sample in enumerate(prompts)]


def searching(
    subject: Subject,
    samples: list[Sample],
    *,
    budget: float = 60,
    axes: dict[str, tuple[int | float | str, ...]] = AXES,
    device: Device = TOY,
    acceptance: float | None = None,
) -> Search:
    trials = Trials(subject, device, SLO, EngineConfig(), acceptance=acceptance)
    return Search(trials, samples, Space(axes, DEFAULT), budget=budget)


@pytest.fixture(scope="module")
def found(subject: Subject) -> dict[float, tuple[Search, Tuned]]:
    """By requests a second."""
    searches = {rate: searching(subject, load(40, rate)) for rate in RATES}
    return {rate: (search, search.search()) for rate, search in searches.items()}


@pytest.mark.parametrize("rate", RATES)
def test_the_search_finds_what_trying_all_finds(
    found: dict[float, tuple[Search, Tuned]], rate: float
) -> None:
    search, tuned = found[rate]
    assert tuned.cost <= 60
    all_trials = [search.trials.run(choice, search.samples) for choice in search.space.all()]
    possible = [trial for trial in all_trials if trial is not None]
    best = max(possible, key=search.merit)
    assert search.merit(tuned.best)[:2] == search.merit(best)[:2]
    assert tuned.best.figures.goodput >= 0.97 * best.figures.goodput
    assert len(tuned.trials) < len(possible)


def test_the_loads_differ_in_what_is_best(found: dict[float, tuple[Search, Tuned]]) -> None:
    """Otherwise the comparison with trying everything would show nothing."""
    assert len({tuned.best.choice for _, tuned in found.values()}) > 1


def test_the_same_load_gives_the_same_answer(
    subject: Subject, found: dict[float, tuple[Search, Tuned]]
) -> None:
    assert searching(subject, load(40, 80)).search() == found[80][1]


def test_a_light_load_is_served_with_what_is_stored(
    found: dict[float, tuple[Search, Tuned]],
) -> None:
    """More rounding is faster, but not better where the SLO is kept anyway."""
    search, tuned = found[5]
    assert met(tuned.best.figures, SLO)
    assert tuned.best.choice.rounding == 0
    trial = search.trials.run(replace(tuned.best.choice, quantization="int8"), search.samples)
    assert trial.figures.pressure(SLO) < tuned.best.figures.pressure(SLO)


def test_what_cannot_be_is_left_out_with_its_reason(
    found: dict[float, tuple[Search, Tuned]],
) -> None:
    _, tuned = found[80]
    assert tuned.impossible
    for choice, why in tuned.impossible.items():
        assert choice.max_num_batched_tokens < choice.max_num_seqs
        assert "below max_num_seqs" in why
    for trial in tuned.trials:
        assert trial.config.max_num_seqs <= trial.config.max_num_batched_tokens


def test_a_model_that_cannot_fit_is_refused_with_the_arithmetic(subject: Subject) -> None:
    tight = replace(TOY, memory_bytes=1 << 20)
    search = searching(subject, load(5, 1), device=tight)
    with pytest.raises(DoesNotFit, match=r"no setting fits a toy.*weights"):
        search.search()


def test_the_budget_is_kept(subject: Subject) -> None:
    tuned = searching(subject, load(200, 100), budget=4).search()
    assert tuned.cost <= 4
    assert tuned.stopped is not None
    assert tuned.default is not None
    assert tuned.short_trials > 4


def test_speculation_is_searched_where_guesses_are_right_so_often(subject: Subject) -> None:
    """With guesses that are always right it pays, and with such that never are it does not."""
    axes = AXES | {
        "kv_cache_dtype": ("auto",),
        "quantization": ("none",),
        "speculation": ("off", AS_IT_PAYS, "4"),
    }
    best = {}
    for rate in (0.0, 1.0):
        search = searching(subject, load(30, 40), budget=40, axes=axes, acceptance=rate)
        best[rate] = search.search().best
    assert best[1.0].choice.speculation != "off"
    assert best[1.0].config.speculation is not None
    assert best[1.0].config.speculation.method == "ngram"
    assert best[0.0].choice.speculation != "4"
    assert best[1.0].figures.goodput > best[0.0].figures.goodput


def test_what_rounding_brings_is_told_apart(found: dict[float, tuple[Search, Tuned]]) -> None:
    search, tuned = found[400]
    assert tuned.best.choice.rounding
    assert tuned.exact.choice.rounding == 0
    assert search.merit(tuned.exact) < search.merit(tuned.best)


def test_the_load_that_is_sustained(found: dict[float, tuple[Search, Tuned]]) -> None:
    search, tuned = found[5]
    speeds = search.sustained(tuned.best)
    kept = [speed for speed, trial in speeds if met(trial.figures, SLO)]
    failed = [speed for speed, trial in speeds if not met(trial.figures, SLO)]
    assert kept
    assert failed
    assert max(kept) < min(failed) < 1.1 * max(kept)


def test_the_pictures_legend_lies_on_no_point(
    found: dict[float, tuple[Search, Tuned]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    search, tuned = found[80]
    tune_plot.draw(
        tuned, search.sustained(tuned.best), search.arrival_rate, SLO, "toy", tmp_path / "a.png"
    )
    monkeypatch.undo()
    (figure,) = drawn
    (legend,) = figure.legends
    assert "best" in [text.get_text() for text in legend.get_texts()]
    renderer = figure.canvas.get_renderer()
    box = legend.get_window_extent(renderer)
    assert not any(box.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes)
    assert all(axes.get_legend() is None for axes in figure.axes)
    plt.close(figure)


def test_loads_that_come_at_once_have_no_speed(subject: Subject) -> None:
    samples = [replace(sample, arrival=0.0) for sample in load(10, 1)]
    search = searching(subject, samples)
    trial = search.trials.run(DEFAULT, samples)
    assert trial is not None
    assert search.sustained(trial) == []


def test_no_more_are_in_flight_than_are_let(subject: Subject) -> None:
    """One at a time, each answer takes what it takes alone."""
    samples = load(20, 400)
    alone, together = (
        Trials(subject, TOY, SLO, EngineConfig(), max_concurrency=most).run(DEFAULT, samples)
        for most in (1, None)
    )
    one = Trials(subject, TOY, SLO, EngineConfig()).run(DEFAULT, samples[:1])
    tpot = one.figures.latencies["tpot"].p50
    assert alone.figures.latencies["tpot"].p99 == pytest.approx(tpot, rel=0.05)
    assert together.figures.latencies["tpot"].p50 > 1.2 * tpot


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_take_what_plan_memory_says(quantization: str) -> None:
    llama = Subject.find("llama-3-8b")
    trials = Trials(llama, PUBLISHED["h100"], SLO, EngineConfig())
    found = trials.setup(replace(DEFAULT, max_num_batched_tokens=512, quantization=quantization))
    assert not isinstance(found, str)
    setup, plan = found
    assert setup.stored == as_rounded(llama, quantization)
    assert plan.weight_bytes == {"int8": 8_156_528_640, "int4": 4_830_445_568}[quantization]


def test_the_busiest_stretch() -> None:
    quiet = [Sample(10, 10, arrival=float(i)) for i in range(20)]
    burst = [Sample(10, 10, arrival=20 + 0.1 * i) for i in range(10)]
    found = busiest(quiet + burst, 10)
    assert [sample.arrival for sample in found] == pytest.approx([0.1 * i for i in range(10)])
    assert busiest(burst, 10) == [replace(s, arrival=(s.arrival or 0) - 20) for s in burst]


# --- the frontier --------------------------------------------------------------------------------

_LATENCY = st.sampled_from([1.0, 2.0, 5.0, 10.0, 20.0])


@st.composite
def _trials(draw: Callable[[Any], Any]) -> TuneTrial:
    tokens = draw(st.integers(1, 6))
    latencies = {name: Latency(draw(_LATENCY), draw(_LATENCY)) for name in ("ttft", "tpot", "e2el")}
    figures = Figures(10, 10, 10, 1.0, tokens, latencies)
    plan = CachePlan(1, 2, 3, 4, 5, 6, 7.0)
    return TuneTrial(DEFAULT, EngineConfig(), plan, figures, 0, False, "")


def _beats(one: TuneTrial, other: TuneTrial) -> bool:
    a, b = one.figures, other.figures
    pairs = [(a.output_throughput, b.output_throughput)] + [
        (-a.latencies[name].p99, -b.latencies[name].p99) for name in SLO.limits
    ]
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


@given(st.lists(_trials(), max_size=20))
def test_the_frontier_is_what_nothing_beats(trials: list[TuneTrial]) -> None:
    kept = frontier(trials, SLO)
    assert not any(_beats(one, other) for one in trials for other in kept)
    for trial in trials:
        if trial not in kept:
            assert any(
                _beats(k, trial) or not (_beats(trial, k) or _differ(trial, k)) for k in kept
            )
    throughputs = [trial.figures.output_throughput for trial in kept]
    assert throughputs == sorted(throughputs, reverse=True)


def _differ(one: TuneTrial, other: TuneTrial) -> bool:
    return one.figures.output_tokens != other.figures.output_tokens or any(
        one.figures.latencies[name].p99 != other.figures.latencies[name].p99 for name in SLO.limits
    )


# --- what is asked, and what is said --------------------------------------------------------------


def test_limits_are_read() -> None:
    assert parse_slo("ttft=500, tpot=50,e2el=9e3") == {"ttft": 500, "tpot": 50, "e2el": 9000}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "itl=5",
             "ttft=1,ttft=2", "ttft:500"],
)  # fmt: skip
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--slo"):
        parse_slo(text)


@pytest.mark.parametrize("attainment", [0, -1, 1.01, math.nan])
def test_an_attainment_that_is_none_is_refused(attainment: float) -> None:
    with pytest.raises(ValueError, match="attainment"):
        Slo({"ttft": 1.0}, attainment)


def test_a_quantized_file_is_served_as_it_is() -> None:
    subject = Subject.find(str(ORACLE / "tiny-llama-k.gguf"))
    assert quantizations(subject, fp8=True) == ("none",)
    with pytest.raises(ValueError, match="quantized already"):
        space(subject, TOY, {"quantization": "int4"}, memory=0.9, tokens=512)


def test_what_is_given_is_not_searched(subject: Subject) -> None:
    given = {"max_num_seqs": 48, "kv_cache_dtype": "fp16", "memory_utilization": 0.3}
    made = space(subject, TOY, given, memory=0.3, tokens=512)
    assert made.axes["max_num_seqs"] == (48,)
    assert made.axes["kv_cache_dtype"] == ("fp16",)
    assert made.axes["memory"] == (0.3,)
    assert min(made.axes["max_num_batched_tokens"]) >= 48
    bounded = space(subject, TOY, {"max_num_batched_tokens": 100}, memory=0.9, tokens=512)
    assert max(bounded.axes["max_num_seqs"]) <= 100
    assert bounded.default.max_num_seqs <= 100


def _parsed(flags: list[str]) -> EngineConfig:
    """What `octavo serve` makes of the flags."""
    import typer
    from typer.main import get_command

    served: list[EngineConfig] = []
    parser = typer.Typer()

    @parser.command()
    @serve_cli.takes(
        engine=(serve_cli.ENGINE_OPTIONS + serve_cli.QUEUE_OPTIONS, serve_cli.engine_config)
    )
    def read(model: str, engine: EngineConfig) -> None:
        served.append(engine)

    get_command(parser).main(["model", *flags], standalone_mode=False)
    (config,) = served
    return config


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(max_num_seqs=7, max_num_batched_tokens=33, kv_cache_memory_bytes=12345678),
        EngineConfig(kv_cache_dtype="int4", quantization="int8", block_size=32, max_model_len=99),
        EngineConfig(enable_prefix_caching=False, memory_utilization=0.35, threads=3, seed=5),
        EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 4}),
    ],
)
def test_the_line_gives_the_same_engine(config: EngineConfig) -> None:
    assert _parsed(engine_flags(config)) == config


def test_the_line_of_what_was_found_gives_that_engine(
    found: dict[float, tuple[Search, Tuned]],
) -> None:
    search, tuned = found[80]
    for trial in tuned.trials:
        line = shlex.split(serve_command("a model", trial))
        assert line[:3] == ["octavo", "serve", "a model"]
        config = _parsed(line[3:])
        assert config == trial.config
        setup = search.trials.setup(trial.choice)
        assert not isinstance(setup, str)
        plan, _ = replace(setup[0], config=config).plan()
        assert plan.num_blocks == trial.plan.num_blocks


# --- the command ---------------------------------------------------------------------------------

FIGURES = "memory=50,int8=900,bf16=450,fp32=200,capacity=1"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "azure.csv"
    lines = [f"2023-11-16 18:00:{i / 4:09.6f},{50 + 13 * i % 90},{5 + i % 9}" for i in range(40)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, args)])


def test_the_command_prints_line_and_prediction(config: Path, trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "a.svg"
    args = (config, "--trace", trace, "--slo", "ttft=500,tpot=50", "--device", FIGURES)
    result = run(*args, "--trials", 8, "--json", "--plot", plot)
    assert result.exit_code == 0, result.output
    found = strict_json.loads(result.stdout)
    assert found["serve_command"].startswith(f"octavo serve {config.parent} --max-num-seqs")
    assert found["met"] is True
    assert found["saturated"] is False
    assert found["headroom"] > 1
    least, most = found["error_band"]["headroom"]
    assert least < found["headroom"] < most
    assert found["predicted"]["requests"] == 40
    assert found["predicted"]["request_goodput"] > 0
    assert found["predicted"]["ttft_ms"]["p99"] <= 500
    assert found["frontier"]
    assert len(found["tried"]) >= len(found["frontier"])
    assert found["sustained"] >= 1
    assert found["basis"].startswith("figures of ")
    assert plot.read_text().startswith("<?xml")
    shown = run(*args, "--trials", 8)
    assert shown.stdout.rstrip().endswith(found["serve_command"])
    assert "the SLO is kept" in shown.stdout
    lines = shown.stdout.splitlines()
    (begin,) = (at for at, line in enumerate(lines) if line.startswith("frontier: "))
    assert lines[begin + 1].split()[:2] == ["seqs", "tokens"]  # each part can be read alone
    assert lines[begin + 2].startswith("frontier 1 ")
    assert f"predictions: {found['basis']}" in shown.stdout


def test_an_slo_that_nothing_keeps_is_said(config: Path, trace: Path) -> None:
    args = (config, "--trace", trace, "--device", FIGURES, "--trials", 6)
    result = run(*args, "--slo", "ttft=0.001,tpot=50")
    assert result.exit_code == 0
    assert "no setting keeps the SLO" in result.stdout
    assert "TTFT fails by" in result.stdout
    found = strict_json.loads(run(*args, "--slo", "ttft=0.001,tpot=50", "--json").stdout)
    assert found["met"] is False
    assert found["sustained"] is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--slo", "ttft=0"], "a limit is from 1e-06 to 1e+12 ms"),
        (["--slo", "ttft=5", "--max-seconds", "1e-9"], "no trial could be made, the time was up"),
        (["--slo", "ttft=5", "--plot", "/no/such/folder/a.svg"], "there is no folder"),
        (["--slo", "ttft=5", "--max-num-seqs", "1000000000000"], "--max-num-seqs"),
        (["--slo", "ttft=5", "--block-size", "17"], "--block-size is 17, not a multiple"),
        (["--slo", "latency=5"], "'latency' is none of ttft, tpot, e2el"),
        (["--slo", "ttft=5", "--slo-attainment", "0"], "attainment"),
        (["--slo", "ttft=5", "--device", "h100", "--confirm"], "--confirm runs on this machine"),
        (["--slo", "ttft=5", "--plot", "a.txt"], "a plot is a file of"),
        (["--slo", "ttft=5", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "8"),
        (["--slo", "ttft=5", "--trials", "0"], "--trials"),
        (["--slo", "ttft=5", "--speculative-acceptance", "1.5"], "from 0 to 1, not 1.5"),
        (
            ["--slo", "ttft=5", "--speculative-config", '{"method": "ngram"}'],
            "how often its guesses are right",
        ),
        *(
            (
                ["--slo", "ttft=5", "--speculative-acceptance", "0.5", "--speculative-config", how],
                "is not simulated: what its drafter takes is not counted; ngram and suffix are",
            )
            for how in (
                '{"method": "layer_skip", "layers": [0, 1]}',
                '{"method": "a.module:Drafter"}',
            )
        ),
    ],
)
def test_bad_use_is_named(config: Path, trace: Path, args: list[str], said: str) -> None:
    if "--device" not in args:
        args = [*args, "--device", FIGURES]
    result = run(config, "--trace", trace, *args)
    assert result.exit_code != 0
    assert said in " ".join((result.output + str(result.exception)).split())


def test_a_bad_trace_is_named(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:02,-5,5\n")
    result = run(config, "--trace", path, "--slo", "ttft=5", "--device", FIGURES)
    assert isinstance(result.exception, SettingsError)  # exit code 1, as of octavo simulate
    assert "trace.csv:2" in str(result.exception)


def test_where_nothing_is_served_no_figure_is_said(config: Path) -> None:
    result = run(
        config, "--num-prompts", 3, "--random-output-len", 9999, "--slo", "ttft=500",
        "--device", FIGURES, "--trials", 2,
    )  # fmt: skip
    assert "3 requests not served: 1024 prompt tokens" in result.stdout or (
        "3 requests not served: the prompt has 1024 tokens" in result.stdout
    )
    assert not re.search(r"\b(inf|nan)\b", result.stdout)


def test_figures_that_nobody_has_are_null() -> None:
    none = Figures(2, 0, 0, 1.0, 0, {"ttft": Latency(math.inf, math.inf)})
    some = Figures(2, 2, 2, 1.0, 9, {"ttft": Latency(3.0, 4.0)})
    for predicted, measured in ((none, some), (some, none), (none, none)):
        compared = comparison(predicted, measured) | {"basis": "not calibrated"}
        json.dumps(compared, allow_nan=False)
        _confirmed_lines(compared)
    assert comparison(some, none)["pairs"]["ttft_ms_p50"] == (3.0, None)


def test_the_defaults_of_gpus_are_said_as_octavo_simulate_says_them() -> None:
    shown = [
        " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
        for command in ("tune", "simulate")
    ]
    for text in ("512; of a GPU 2048", "0.5; of a GPU 0.92"):
        assert all(text in help for help in shown)


def test_the_command_lets_so_many_in_flight(config: Path, trace: Path) -> None:
    args = ("--trace", trace, "--slo", "ttft=500,tpot=50", "--device", FIGURES, "--trials", 3)
    args = (*args, "--trace-speedup", 1000, "--json")
    free, one = (run(config, *args, *more) for more in ((), ("--max-concurrency", 1)))
    assert one.exit_code == 0, one.output
    latencies = [json.loads(each.stdout)["default"]["tpot_ms"]["p50"] for each in (one, free)]
    assert latencies[0] < latencies[1]


def test_the_live_engine_is_given_no_more_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    most = []
    live = confirm.replay

    def watched(engine: Any, samples: Any, **options: Any) -> Replay:
        class Running:
            def on_step(self, step: Any) -> None:
                most.append(len(step.scheduled.batch.seq_offsets) - 1)

            def on_end(self, record: Any) -> None: ...

        engine.observers.append(Running())
        return live(engine, samples, **options)

    monkeypatch.setattr(confirm, "replay", watched)
    config = EngineConfig(kv_cache_memory_bytes=8 << 20, threads=1)
    samples = [Sample(9, 4, (Part(index, 9),), arrival=0.0) for index in range(1, 9)]
    for concurrency in (2, None):
        most.clear()
        done = confirm.confirmed(str(TINY), config, samples, SLO, 0, concurrency, lambda _: None)
        assert done.figures.completed == 8
        assert done.calibration is None  # nobody has
        assert max(most) <= 2 if concurrency else max(most) > 2


def test_confirming_needs_weights(config: Path, trace: Path) -> None:
    result = run(config, "--trace", trace, "--slo", "ttft=500", "--confirm")
    assert result.exit_code != 0
    assert "is a shape without any" in " ".join(result.output.split())


def test_the_prediction_is_compared_with_the_live_engine(trace: Path) -> None:
    result = run(
        TINY, "--trace", trace, "--slo", "ttft=500,tpot=50", "--trials", 4, "--confirm", "--json",
        "--trace-speedup", 20, "--max-input-len", 40, "--kv-cache-memory-bytes", "8MiB",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    confirmed = strict_json.loads(result.stdout)["confirmed"]
    assert confirmed["measured"]["completed"] == 40
    predicted, measured = confirmed["pairs"]["output_throughput"]
    error = confirmed["error"]["output_throughput"]
    assert error == pytest.approx(predicted / measured - 1)


def test_an_slo_is_kept_for_each_class_of_a_load() -> None:
    slo = Slo({"ttft": 5.0}, 0.9)
    figures = Figures(100, 100, 99, 1.0, 9, {"ttft": Latency(3.0, 4.0)}, {"few": 0.5, "many": 1.0})
    assert not met(figures, slo)
    assert met(replace(figures, classes={"few": 0.9, "many": 1.0}), slo)
    assert met(replace(figures, classes={}), slo)
