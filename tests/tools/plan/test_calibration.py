"""Calibrations: a fit finds what made the times, files come back as they were or not at all."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import strict_json
from faults import patch
from machine.test_limits import made_up
from octavo.cli import app
from octavo.cli.calibrate import as_text, disturbance
from octavo.engine.calibration import Calibration, CalibrationKey, KindError, Moment, Prediction
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.executor.base import Batch, StepResult
from octavo.executor.cost import Arithmetic, CostModel, Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import WeightFormat
from octavo.machine.limits import Limits
from octavo.models.config import Activation, Experts, Layer, ModelConfig, Rope
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request, RequestRecord
from octavo.tools.plan import calibrating
from octavo.tools.plan import subject as planned
from octavo.tools.plan.calibrating import misfit
from octavo.tools.plan.fitting import Observation, fit, kind_of, slowness
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.observing import Unobservable, observe, probe
from octavo.tools.plan.quantization import StoredWeights
from octavo.tools.plan.simulation import Setup, simulated_engine
from paths import TINY

CONFIG = ModelConfig(
    family="llama",
    vocab_size=4096,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=1536,
    context_length=4096,
    norm_eps=1e-5,
    activation=Activation.SILU,
    attention_scale=0.125,
    tied_embeddings=True,
    layers=tuple(Layer(Rope(10000.0, 64, interleaved=True), None) for _ in range(8)),
)
PROGRAM, LAYOUT = program(CONFIG), KvLayout.of(CONFIG)
INT8 = {role: Arithmetic.INT8 for role, shape in PROGRAM.weights.items() if len(shape) == 2}
COSTS = CostModel(PROGRAM, LAYOUT, arithmetic=INT8, attention=Arithmetic.BF16)
LIMITS = Rates(50e9, 200e9, int8_ops_per_second=800e9, bf16_ops_per_second=400e9)
TRUE = Rates(
    31e9,
    110e9,
    700e-6,
    int8_ops_per_second=440e9,
    bf16_ops_per_second=220e9,
    knee=2.2,
    kv_bytes_per_second=24e9,
    attention_ops_per_second=130e9,
    attention_knee=1.0,
    threads=2,
    unpacking=1.6,
    batch_overhead=300e-6,
    row_overhead=45e-6,
    chunk_overhead=220e-6,
)


def batch(spans: list[tuple[int, int, bool]]) -> Batch:
    """``spans``: first position, tokens, and whether the last row wants logits, by sequence."""
    offsets = np.cumsum([0, *(tokens for _, tokens, _ in spans)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + n) for start, n, _ in spans])
    rows = [offsets[i + 1] - 1 for i, (_, _, wants) in enumerate(spans) if wants]
    return Batch(
        np.zeros(len(positions), np.int32),
        positions.astype(np.int32),
        offsets,
        np.arange(len(spans), dtype=np.int32),
        np.zeros((1, len(spans), 0), np.int32),
        np.array(rows, np.int32),
        np.zeros((0, 2), np.int32),
    )


def batches(seed: int = 0, count: int = 150) -> list[Batch]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        decodes = int(rng.choice([0, 1, 2, 4, 8, 16, 32, 64]))
        context = int(rng.choice([20, 100, 400, 1500]))
        spans = [(int(rng.integers(1, 2 * context)), 1, True) for _ in range(decodes)]
        if not decodes or rng.random() < 0.4:
            length = int(rng.choice([8, 32, 100, 256, 448]))
            spans.append((int(rng.choice([0, 0, 512])), length, bool(rng.random() < 0.7)))
        made.append(batch(spans))
    return made


def observed(rates: Rates, noise: float, seed: int = 0, count: int = 150) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [
        Observation(each, COSTS.seconds(each, rates) * math.exp(rng.normal(0, noise)))
        for each in batches(seed, count)
    ]


def test_a_fit_finds_the_parameters() -> None:
    fitted = fit(COSTS, observed(TRUE, 0.0), LIMITS, 2)
    for name in (
        "bytes_per_second", "int8_ops_per_second", "attention_ops_per_second", "step_overhead",
        "row_overhead", "chunk_overhead", "kv_bytes_per_second",
    ):  # fmt: skip
        assert getattr(fitted.rates, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert fitted.rates.knee == pytest.approx(TRUE.knee, rel=0.15)
    assert fitted.error < 0.005


@pytest.mark.parametrize("held_up", [0.0, 0.1])
def test_it_predicts_through_noise_and_interruptions(held_up: float) -> None:
    """Steps that somebody else held up, by up to four times, do not bend it."""
    rng = np.random.default_rng(5)
    seen = [
        each._replace(seconds=each.seconds * (1 + 3 * rng.random()))
        if rng.random() < held_up
        else each
        for each in observed(TRUE, 0.05, seed=1)
    ]
    fitted = fit(COSTS, seen, LIMITS, 2)
    swift = fitted.rates.slowed(1 / fitted.held_up)
    ratios = [COSTS.seconds(each, swift) / COSTS.seconds(each, TRUE) for each in batches(2)]
    assert abs(np.median(ratios) - 1) < 0.02
    assert np.quantile(np.abs(np.array(ratios) - 1), 0.9) < 0.05
    assert 0.02 < fitted.error < 0.09  # the noise's own, and it says so


def test_another_machine_is_no_matter_of_the_usual() -> None:
    """Eight times as fast as the machine's limits suggest."""
    fast = replace(
        TRUE, bytes_per_second=250e9, int8_ops_per_second=3.5e12, ops_per_second=9e11,
        bf16_ops_per_second=1.8e12, kv_bytes_per_second=190e9, attention_ops_per_second=1e12,
    )  # fmt: skip
    fitted = fit(COSTS, observed(fast, 0.01), LIMITS, 2)
    assert fitted.error < 0.02


def test_errors_are_told_by_kind() -> None:
    seen = observed(TRUE, 0.02)
    fitted = fit(COSTS, seen, LIMITS, 2)
    assert sum(error.steps for error in fitted.errors) == len(seen)
    kinds = [error.kind for error in fitted.errors]
    assert "decode, up to 1 token" in kinds
    assert any(kind.startswith("decode and prompt") for kind in kinds)
    assert all(abs(error.bias) < 0.05 for error in fitted.errors if error.steps > 8)


@pytest.mark.parametrize(("memory", "processor"), [(1.3, 1.0), (1.0, 0.8), (0.9, 1.25)])
def test_few_steps_tell_what_has_become_slower(memory: float, processor: float) -> None:
    seen = observed(TRUE.slowed(memory, processor), 0.03, seed=3, count=80)
    found = slowness(COSTS, seen, TRUE, believed=1.0)
    assert found[0] == pytest.approx(memory, rel=0.04)
    assert found[1] == pytest.approx(processor, rel=0.03)
    cautious = slowness(COSTS, seen, TRUE, believed=0.5)
    assert cautious == pytest.approx([math.sqrt(each) for each in found])


def test_held_up_steps_count_in_the_mean() -> None:
    """One step in ten takes twice as long: rates are of the mean, and a few steps more or less that
    were held up are not taken for a slower machine.
    """
    seen = [
        each._replace(seconds=each.seconds * (2 if index % 10 == 0 else 1))
        for index, each in enumerate(observed(TRUE, 0.01, count=400))
    ]
    fitted = fit(COSTS, seen, LIMITS, 2)
    assert fitted.held_up == pytest.approx(1.1, abs=0.02)
    predicted = sum(COSTS.seconds(each.batch, fitted.rates) for each in seen)
    assert predicted == pytest.approx(sum(each.seconds for each in seen), rel=0.03)
    assert all(abs(error.bias) < 0.03 for error in fitted.errors if error.steps > 15)
    now = [each for index, each in enumerate(seen) if index % 10]
    found = slowness(COSTS, now, fitted.rates, fitted.held_up)
    assert found == pytest.approx((1.0, 1.0), rel=0.02)


@pytest.mark.parametrize("rates", [TRUE, LIMITS])
def test_a_slower_machine_takes_so_much_longer(rates: Rates) -> None:
    for each in batches(4, 10):
        before, after = (COSTS.seconds(each, rate) for rate in (rates, rates.slowed(1.5, 1.5)))
        assert after == pytest.approx(1.5 * before, rel=1e-12)
        assert before < COSTS.seconds(each, rates.slowed(1.2, 1.5)) <= after * (1 + 1e-12)
    assert rates.slowed(1.0, 1.0) == rates


def test_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="19 steps are too few"):
        fit(COSTS, observed(TRUE, 0.0)[:19], LIMITS, 2)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(1.0, 16.0), st.floats(1.0, 16.0))
def test_parts_add_up_to_the_step(seed: int, knee: float, attention_knee: float) -> None:
    rates = replace(TRUE, knee=knee, attention_knee=attention_knee)
    for each in batches(seed, 5):
        parts = sum(count * cost.seconds(rates) for cost, count in COSTS.parts(each))
        overhead = rates.overhead(*COSTS.size(each)[:3])
        assert COSTS.seconds(each, rates) == pytest.approx(parts + overhead, rel=1e-12)
        ops = sum(cost.seconds(rates) for cost in COSTS.by_op(each))
        assert ops == pytest.approx(parts, rel=1e-9)


@given(st.floats(1.0, 16.0))
def test_a_knee_lies_between_the_longer_and_the_sum(knee: float) -> None:
    soft, hard = Rates(2.0, 3.0, knee=knee), Rates(2.0, 3.0)
    for moved, computed in ((4, 6), (1, 60), (50, 2), (0, 9), (9, 0)):
        least = hard.seconds(moved, computed, Arithmetic.FP32)
        most = moved / 2 + computed / 3
        assert least * (1 - 1e-12) <= soft.seconds(moved, computed, Arithmetic.FP32)
        assert soft.seconds(moved, computed, Arithmetic.FP32) <= most * (1 + 1e-12)


def test_rates_that_no_machine_has_are_refused() -> None:
    for wrong in (
        {"knee": 0.5}, {"knee": math.nan}, {"attention_knee": 17.0}, {"kv_bytes_per_second": 0.0},
        {"row_overhead": -1e-9}, {"chunk_overhead": math.nan}, {"attention_ops_per_second": -1.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"rates must be|a knee is"):
            Rates(**wrong)


# --- stored --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_cache(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    monkeypatch.setattr(Limits, "measure", lambda *_, **__: made_up())


TWO = EngineConfig(threads=2)


def key(config: EngineConfig = TWO, layout: KvLayout = LAYOUT) -> CalibrationKey:
    formats = dict.fromkeys(PROGRAM.weights, WeightFormat.Q8_0)
    return CalibrationKey.of(PROGRAM, formats, {}, layout, config)


def experts(chosen: int) -> CalibrationKey:
    """Return the key of a model with eight experts that sends each token to so many."""
    layers = tuple(replace(layer, experts=Experts(8, chosen, 512, True)) for layer in CONFIG.layers)
    sparse = program(replace(CONFIG, family="mixtral", layers=layers))
    formats = dict.fromkeys(sparse.weights, WeightFormat.Q8_0)
    return CalibrationKey.of(sparse, formats, {}, LAYOUT, TWO)


def calibration(of: CalibrationKey) -> Calibration:
    errors = (KindError("decode, up to 1 token", 40, 3e-3, 0.01, 0.03),)
    return Calibration(
        "a model", of, "avx2", "2026-01-01T00:00:00+00:00", 900, 40.0, TRUE, 1.02,
        {"knee": 0.1}, LIMITS, errors, 0.03,
    )  # fmt: skip


def test_what_is_stored_comes_back() -> None:
    stored = calibration(key())
    assert Calibration.load(key()) is None
    path = stored.save()
    assert Calibration.load(key()) == stored
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_refresh_is_stored_beside() -> None:
    moment = Moment(1.2, 0.9, "2026-01-02T00:00:00+00:00", 150)
    fresh = replace(calibration(key()), moment=moment)
    fresh.save()
    loaded = Calibration.load(key())
    assert loaded == fresh
    assert loaded.rates == TRUE
    assert loaded.current == TRUE.slowed(1.2, 0.9)
    assert calibration(key()).current == TRUE


def test_what_others_took_is_kept_and_said() -> None:
    stored = replace(calibration(key()), others=0.4)
    stored.save()
    assert Calibration.load(key()) == stored
    assert "others took 40% of the processor" in stored.standing
    assert "others took 40% of the processor" in disturbance(stored, refresh=False)
    assert "run it again" in disturbance(stored, refresh=False)
    assert disturbance(calibration(key()), refresh=False) == ""
    noisy = replace(calibration(key()), error=0.2)
    assert "median error is 20%" in disturbance(noisy, refresh=False)
    moment = Moment(1.3, 0.95, "2026-05-06T07:08:09+00:00", 99, 0.3)
    assert "beside them" in disturbance(replace(stored, moment=moment), refresh=True)
    calm = replace(moment, others=0.0)
    assert disturbance(replace(stored, moment=calm), refresh=True) == ""


def test_a_calibration_of_before_others_were_counted_is_read() -> None:
    data = calibration(key()).as_dict()
    del data["others"]
    assert Calibration.from_dict(data) == calibration(key())
    with pytest.raises(ValueError, match=r"\$\.others"):
        Calibration.from_dict(data | {"others": -1})


def test_a_calibration_that_no_longer_fits_the_machine_says_so() -> None:
    stored = calibration(key())
    assert misfit(stored, stored.limits) == ""
    assert misfit(stored, stored.limits.slowed(1.2)) == ""
    assert "reading memory is 0.50 times as fast here" in misfit(stored, stored.limits.slowed(2, 1))
    assert "arithmetic is 2.00 times as fast here" in misfit(stored, stored.limits.slowed(1, 0.5))
    assert "octavo calibrate again" in misfit(stored, stored.limits.slowed(2))


def test_no_progress_counts_below_zero() -> None:
    said: list[str] = []
    observe(simulated_engine(setup()), seconds=30.0, progress=said.append)
    times = [int(line.split()[-4]) for line in said if line.endswith("s to go")]
    assert times
    assert min(times) == 0
    assert not any("-" in line.split(",")[-1] for line in said)


def test_an_infinite_knee_is_stored_as_null() -> None:
    """And as Python writes infinity it is still read."""
    stored = replace(calibration(key()), rates=replace(TRUE, knee=math.inf))
    path = stored.save()
    facts = strict_json.loads(path.read_text())
    assert facts["rates"]["knee"] is None
    assert facts["limits"]["attention_knee"] is None
    assert facts["rates"]["attention_knee"] == TRUE.attention_knee
    assert Calibration.load(key()) == stored
    facts["rates"]["knee"] = math.inf
    path.write_text(json.dumps(facts))
    assert "Infinity" in path.read_text()
    assert Calibration.load(key()) == stored


def test_nothing_else_gets_it() -> None:
    """Another model, format, cache, number of threads, tier or machine has none."""
    calibration(key()).save()
    formats = dict.fromkeys(PROGRAM.weights, WeightFormat.Q8_0)
    two, four = (experts(chosen) for chosen in (2, 4))
    calibration(two).save()
    others = [
        four,
        key(EngineConfig(threads=1)),
        key(EngineConfig(threads=2, isa="generic")),
        key(layout=KvLayout.of(CONFIG, dtype=KvDtype.INT8)),
        replace(key(), cpu="another"),
        replace(key(), kernels="another"),
        CalibrationKey.of(
            PROGRAM, formats | {"layers.3.ffn_up": WeightFormat.Q4_0}, {}, LAYOUT, TWO
        ),
    ]
    assert all(Calibration.load(other) is None for other in others)


def test_a_file_of_another_subject_is_not_believed() -> None:
    mine, other = key(), replace(key(), cpu="another")
    path = calibration(other).save()
    path.rename(mine.path)
    assert Calibration.load(mine) is None


def test_one_of_another_form_asks_for_a_new_one(caplog: pytest.LogCaptureFixture) -> None:
    """As an older version has stored it."""
    path = calibration(key()).save()
    data = json.loads(path.read_text())
    del data["held_up"], data["moment"], data["rates"]["unpacking"], data["rates"]["threads"]
    data["rates"]["ramp"] = 0.3
    path.write_text(json.dumps(data))
    assert Calibration.load(key()) is None
    assert "of another version's cost model; run octavo calibrate again" in caplog.text


DAMAGE = [
    lambda data: data.pop("rates"),
    lambda data: data.update(more=1),
    lambda data: data["rates"].update(bytes_per_second=-1.0),
    lambda data: data["rates"].update(bytes_per_second="50e9"),
    lambda data: data["rates"].update(knee=math.nan),
    lambda data: data["rates"].update(step_overhead=math.inf),
    lambda data: data["rates"].update(more=1.0),
    lambda data: data.update(rates=[]),
    lambda data: data.update(key=3),
    lambda data: data.update(errors=[{"kind": 1}]),
    lambda data: data.update(error="low"),
    lambda data: data.update(deviations=[1, 2]),
    lambda data: data["rates"].update(step_overhead=1e308),
    lambda data: data["rates"].update(bytes_per_second=1e-320),
    lambda data: data["rates"].update(ops_per_second=10**400),
    lambda data: data["rates"].update(unpacking=1e308),
    lambda data: data["limits"].update(bytes_per_second=1e300),
    lambda data: data.update(error=-5),
    lambda data: data.update(held_up=0.0),
    lambda data: data.update(moment=1.1),
    lambda data: data.update(moment={"memory": 1.1}),
    lambda data: data.update(
        moment={"memory": 1e3, "processor": 1.0, "date": "2026-01-02", "steps": 9}
    ),
    lambda data: data.update(moment={"memory": 1.0, "processor": 1.0, "date": "today", "steps": 9}),
    lambda data: data.update(error=True),
    lambda data: data.update(date="a\nb"),
    lambda data: data.update(date=5),
    lambda data: data.update(date="yesterday"),
    lambda data: data.update(name="a\nb"),
    lambda data: data.update(tier=None),
    lambda data: data.update(steps="many"),
    lambda data: data.update(steps=-1),
    lambda data: data.update(seconds=math.inf),
    lambda data: data.update(deviations={"knee": math.nan}),
    lambda data: data["errors"][0].update(kind=["a"]),
    lambda data: data["errors"][0].update(steps=0.5),
    lambda data: data["errors"][0].update(seconds=None),
    lambda data: data["errors"][0].update(bias=-7.0),
    lambda data: data["errors"][0].update(error="low"),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_as_none(damage: object, caplog: pytest.LogCaptureFixture) -> None:
    path = calibration(key()).save()
    data = json.loads(path.read_text())
    damage(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    assert Calibration.load(key()) is None
    assert f"the stored calibration is unreadable: {path}: not a calibration" in caplog.text


@pytest.mark.parametrize("text", ["", "[", "[1]", "null", "[" * 100_000, "\x00\xff"])
def test_no_text_is_too_strange(text: str) -> None:
    path = calibration(key()).save()
    path.write_bytes(text.encode("latin-1"))
    assert Calibration.load(key()) is None


# --- used ----------------------------------------------------------------------------------------


def setup(measured: bool = True, threads: int = 2) -> Setup:
    formats = dict.fromkeys(PROGRAM.weights, WeightFormat.Q8_0)
    sizes = {role: 2 * math.prod(shape) for role, shape in PROGRAM.weights.items()}
    return Setup(
        planned.Subject("a model", PROGRAM),
        StoredWeights("as stored", formats, sizes, None, {}),
        Device("a machine", lambda _: LIMITS, 1 << 30, measured=measured),
        EngineConfig(threads=threads, kv_cache_memory_bytes=1 << 24),
    )


def test_the_simulator_takes_what_is_stored() -> None:
    def rates(of: Setup) -> Rates:
        executor = simulated_engine(of).executor
        return executor.rates

    assert rates(setup()) == LIMITS
    assert setup().basis().startswith("not calibrated")
    calibration(key()).save()
    assert rates(setup()) == TRUE
    assert "3.0%" in setup().basis()
    paced = simulated_engine(replace(setup(), config=replace(setup().config, itl_target=0.05)))
    assert paced.step_times.predicts_steps
    assert paced.step_times.spread == pytest.approx(0.03 / 0.6745)
    assert setup().basis().endswith("at the speed that the machine had then")
    moment = Moment(1.25, 0.9, "2026-02-03T04:05:06+00:00", 150)
    replace(calibration(key()), moment=moment).save()
    assert rates(setup()) == TRUE.slowed(1.25, 0.9)
    assert "2026-02-03T04:05:06+00:00: memory took 1.25 and the processor 0.90" in setup().basis()
    assert rates(setup(threads=1)) == LIMITS  # it was for two
    assert rates(setup(measured=False)) == LIMITS  # another device


def test_leaps_take_what_steps_take() -> None:
    """Overheads of rows and batches, too."""
    for sequences in (1, 2, 17):
        positions = np.arange(5, 5 + 40 * sequences, 40, dtype=np.int32)
        leaps = COSTS.decode_seconds(positions, TRUE)
        for ahead in range(3):
            spans = [(int(position) + ahead, 1, True) for position in positions]
            assert next(leaps) == COSTS.seconds(batch(spans), TRUE)


def test_a_prediction_follows_the_engine() -> None:
    """The engine's clock is the cost model's, at 1.25 times its speed."""
    told: list[tuple[float, float]] = []
    calibration(key()).save()
    engine = simulated_engine(setup())
    assert isinstance(engine.executor, SimulatedExecutor)
    watch = Prediction(engine, TRUE.slowed(1.25, 1.25))
    watch.tell = lambda predicted, actual: told.append((predicted, actual))
    engine.observers.append(watch)
    for index, length in enumerate((70, 3, 700)):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        prompt = [index + 1] * length
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, params=params))
    while engine.has_work():
        engine.step()
    assert len(told) == engine.stats().steps - 1  # the last is not settled
    assert all(predicted == pytest.approx(1.25 * actual) for predicted, actual in told)
    assert watch.ratio == pytest.approx(0.8)


# --- observed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [64, 4096])
def test_the_script_shows_all_kinds_of_steps(longest: int) -> None:
    """On a simulated engine; a short context leaves out what does not fit."""
    calibration(key()).save()
    config = EngineConfig(threads=2, max_model_len=longest, kv_cache_memory_bytes=1 << 28)
    engine = simulated_engine(replace(setup(), config=config))
    seen = observe(engine, seconds=10.0)
    assert engine.clock.now() == pytest.approx(10.0, rel=0.1)
    kinds = {kind_of(each.batch) for each in seen}
    assert all(each.seconds > 0 for each in seen)
    assert max(int(each.batch.positions.max()) for each in seen) < longest
    assert {"decode, up to 1 token", "decode, up to 64 tokens", "prompt, up to 32 tokens"} <= kinds
    long = {"decode, long context, up to 8 tokens", "prompt, up to 1024 tokens"}
    assert kinds >= long if longest > 64 else not kinds & long
    assert any(kind.startswith("decode and prompt") for kind in kinds)
    assert not engine.has_work()
    assert engine.observers == []
    engine.check_integrity()
    if longest == 64:
        return
    fitted = fit(COSTS, seen[::3], LIMITS, 2)
    assert fitted.error < 0.01  # it can be told from such steps what they took
    assert max(abs(each.bias) for each in fitted.errors) < 0.03


@pytest.mark.parametrize(("memory", "processor"), [(1.0, 1.0), (1.3, 1.0), (0.8, 1.1), (1.05, 0.8)])
def test_a_probe_sees_how_fast_memory_and_processor_are(memory: float, processor: float) -> None:
    """In 3 seconds on a simulated machine, and leaves nothing behind."""
    calibration(key()).save()
    engine = simulated_engine(setup())
    engine.executor.rates = TRUE.slowed(memory, processor)
    seen = probe(engine, seed=3)
    assert engine.clock.now() == pytest.approx(3.0, abs=0.3)
    found = slowness(COSTS, seen, TRUE, believed=1.0)
    assert found == pytest.approx((memory, processor), rel=0.01)
    kinds = {kind_of(each.batch).partition(",")[0] for each in seen}
    assert kinds == {"decode", "prompt", "decode and prompt"}
    # It would see the machine at many moments.
    turns = sum(a.batch.num_tokens > 20 > b.batch.num_tokens for a, b in pairwise(seen))
    assert turns > 10
    assert not engine.has_work()
    assert engine.observers == []
    engine.check_integrity()


def test_a_refresh_keeps_the_calibration() -> None:
    """On a real engine, whose speed is anybody's guess."""
    loaded = load_engine(TINY, EngineConfig(threads=1, kv_cache_memory_bytes=8 << 20))
    try:
        stored = calibration(CalibrationKey.loaded(loaded))
        fresh = calibrating.refreshed(stored, loaded, seconds=0.1)
        assert fresh.moment.steps >= 20
        assert replace(fresh, moment=None) == stored
        assert fresh.current == TRUE.slowed(fresh.moment.memory, fresh.moment.processor)
        fresh.save()
        assert Calibration.of_engine(loaded) == fresh
    finally:
        loaded.engine.close()


def test_confirming_sees_how_fast_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is compared with what is predicted for that speed; the search's own figures stay."""
    moment = Moment(40.0, 40.0, "2026-05-06T07:08:09+00:00", 99)
    monkeypatch.setattr(calibrating, "refreshed", lambda self, _: replace(self, moment=moment))
    loaded = load_engine(TINY, EngineConfig(threads=1, kv_cache_memory_bytes=8 << 20))
    stored = calibration(CalibrationKey.loaded(loaded))
    loaded.engine.close()
    stored.save()
    shown = CliRunner().invoke(app, [
        "tune", str(TINY), "--slo", "ttft=500", "--threads", "1", "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", "8MiB", "--num-prompts", "6", "--request-rate", "40",
        "--random-input-len", "20", "--random-output-len", "8", "--trials", "2", "--lossless",
        "--confirm", "--json",
    ])  # fmt: skip
    assert shown.exit_code == 0, shown.output
    found = strict_json.loads(shown.stdout)
    slow, searched = found["confirmed"]["pairs"]["tpot_ms_p50"][0], found["predicted"]["tpot_ms"]
    assert slow == pytest.approx(40 * searched["p50"], rel=0.3)
    assert "of 2026-05-06T07:08:09+00:00" in found["confirmed"]["basis"]
    assert "at the speed that the machine had then" in found["basis"]
    kept = Calibration.load(stored.key)
    assert kept.moment == moment


def test_the_command_refreshes_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        calibrating,
        "refreshed",
        lambda self, _: replace(self, moment=Moment(1.3, 0.95, "2026-05-06T07:08:09+00:00", 99)),
    )
    config = EngineConfig(threads=1, kv_cache_memory_bytes=8 << 20)
    command = ["calibrate", str(TINY), "--refresh", "--threads", "1"]
    command += ["--kv-cache-memory-bytes", str(8 << 20)]
    with monkeypatch.context() as unloaded:
        unloaded.setattr("octavo.engine.load.load_engine", None)  # refused before that
        nothing = CliRunner().invoke(app, command)
        assert "run octavo calibrate without --refresh" in str(nothing.exception)
        speculating = [*command[:2], "--speculative-config", '{"method": "ngram"}']
        assert "calibrate without it" in str(CliRunner().invoke(app, speculating).exception)
    loaded = load_engine(TINY, config)
    stored = calibration(CalibrationKey.loaded(loaded))
    loaded.engine.close()
    assert CalibrationKey.of_checkpoint(loaded.checkpoint, config) == stored.key
    stored.save()
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "memory took 1.30 and the processor 0.95 times as long" in shown.output
    found = Calibration.load(stored.key)
    assert found.moment == Moment(1.3, 0.95, "2026-05-06T07:08:09+00:00", 99)
    as_json = CliRunner().invoke(app, [*command, "--json"])
    assert strict_json.loads(as_json.stdout)["moment"]["memory"] == 1.3


def test_steps_include_the_admission_of_their_requests() -> None:
    engine = simulated_engine(setup())
    admit = engine.admit

    def slowly(request: Request, record: RequestRecord) -> None:
        admit(request, record)
        engine.clock.advance(1.0)

    patch(engine, admit=slowly)
    seen = observe(engine, seconds=200.0)
    prompts = [each for each in seen if kind_of(each.batch).startswith("prompt")]
    first = [each for each in prompts if each.batch.positions[0] == 0]  # chunk of a prompt
    assert first
    assert all(each.seconds > 1.0 for each in first)
    assert any(each.seconds < 0.5 for each in seen)  # after which nothing was added


@pytest.mark.parametrize("budget", [1, 4, 7])
def test_a_small_budget_is_shown_and_probed_too(budget: int) -> None:
    """Prompts of no more tokens than a step takes, be they ever so few."""
    config = EngineConfig(
        threads=2, max_num_seqs=budget, max_num_batched_tokens=budget, max_model_len=64,
        kv_cache_memory_bytes=1 << 26,
    )  # fmt: skip
    engine = simulated_engine(replace(setup(), config=config))
    assert max(each.batch.num_tokens for each in observe(engine, seconds=2.0)) == budget
    assert probe(engine, seconds=1.0)
    engine.check_integrity()


def test_what_cannot_be_observed_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(threads=1, kv_cache_memory_bytes=8 << 20)
    loaded = load_engine(TINY, config)

    def broken(_: Batch) -> StepResult:
        raise RuntimeError("no arithmetic today")

    monkeypatch.setattr(loaded.engine.executor, "execute", broken)
    try:
        with pytest.raises(SettingsError, match=r"cannot run the load: .*no arithmetic today"):
            calibrating.measure(loaded, seconds=1.0)
    finally:
        loaded.engine.close()


def test_a_request_that_fails_ends_it() -> None:
    engine = simulated_engine(setup())

    def broken(_: Batch) -> StepResult:
        raise RuntimeError("no arithmetic today")

    patch(engine.executor, execute=broken)
    with pytest.raises(Unobservable, match="no arithmetic today"):
        observe(engine, seconds=1.0)
    assert engine.observers == []


def test_the_report_has_every_parameter_and_kind() -> None:
    text = as_text(calibration(key()))
    parameters = (
        "31 GB/s", "62%", "440 Gop/s", "55%", "300 µs", "45 µs", "220 µs", "24 GB/s", "48%",
        "130 Gop/s",
    )  # fmt: skip
    for part in (*parameters, "decode, up to 1 token", "+1.0%", "3.0%"):
        assert part in text, part
