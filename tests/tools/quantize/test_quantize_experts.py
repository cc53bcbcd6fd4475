"""Sparse experts: each learns from the rows routed to it, and who saw too few is counted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.bind import ROUTER
from octavo.models import families
from octavo.models.program import slots
from octavo.tools.quantize.calibrate import Moments
from octavo.tools.quantize.gptq_rounding import relative_loss
from octavo.tools.quantize.hf_model import places
from octavo.tools.quantize.layers import split
from octavo.tools.quantize.quantize_checkpoint import quantize
from octavo.tools.quantize.quantizer import SEEN, Quantizer, Report
from octavo.tools.quantize.state import State
from tools.quantize.quantizing import (
    SAMPLES,
    Float32,
    logits_of,
    make,
    modules,
    random_folder,
    recipe,
    weights_of,
)
from tools.quantize.test_gguf_model import recorded
from tools.quantize.test_run import Stop, digests, stop_at

SPARSE = ("mixtral", "qwen3moe")
LONG = np.random.default_rng(5).integers(0, 90, (12, 64)).astype(np.int32)
LAYOUTS: list[dict[str, Any]] = [
    {"format": "gptq", "method": "gptq", "order": "group"},
    {"format": "awq", "method": "awq"},
    {"format": "compressed-tensors", "symmetric": True},
    {"format": "compressed-tensors", "bits": 8, "group": None, "symmetric": True},
]


def words(how: dict[str, object]) -> str:
    return " ".join(str(value) for value in how.values())


@pytest.mark.parametrize("how", LAYOUTS, ids=words)
@pytest.mark.parametrize("name", SPARSE)
def test_modules_mean_the_same_to_every_reader(
    name: str, how: dict[str, Any], tmp_path: Path
) -> None:
    source = random_folder(name, tmp_path / "source", num_hidden_layers=1)
    make(source, tmp_path / "out", **how)
    checkpoint = load(tmp_path / "out")
    ours, found = weights_of(checkpoint), modules(tmp_path / "out")
    roles = {
        place.name: place.roles[0]
        for place in places(checkpoint.config, list(checkpoint.weights))
        if place.name in found
    }
    experts = checkpoint.config.experts
    assert len(roles) == (4 + 3 * experts.count) * len(checkpoint.config.layers)
    for module, role in roles.items():
        assert np.array_equal(found[module], ours[role]), module
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if how["format"] != "gptq":  # whose readers see it by the tensors
        kept = config.get("modules_to_not_convert") or config["ignore"]
        assert [each for each in kept if each != "lm_head"] == [
            place.name
            for place in places(checkpoint.config, list(checkpoint.weights))
            if place.roles[0].endswith(ROUTER)
        ]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("name", SPARSE)
def test_routers_and_embeddings_stay(name: str, method: str, tmp_path: Path) -> None:
    source = random_folder(name, tmp_path / "source")
    make(source, tmp_path / "out", method=method)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    kept = {key for key in before if key in after}
    assert sum(".gate.weight" in key for key in kept) == len(load(source).config.layers)
    for key in kept:
        assert np.array_equal(before[key].view(np.uint16), after[key].view(np.uint16)), key


def error_of(source: Path, out: Path, ids: Any) -> float:
    expected, got = logits_of(load(source), ids), logits_of(load(out), ids)
    return float(np.square(got - expected).mean())


@pytest.mark.parametrize("format", ["gptq", "gguf"])
@pytest.mark.parametrize("name", SPARSE)
def test_looking_at_a_text_loses_less(name: str, format: str, tmp_path: Path) -> None:
    """On what was looked at, of a text on which every expert has seen enough."""
    source = recorded("gpt2", tmp_path / "source", family=name)
    lost = {}
    for method in ("rtn", "gptq", "awq"):
        out = tmp_path / (f"{method}.gguf" if format == "gguf" else method)
        chosen, layout = recipe(method, format)
        outcome = quantize(load(source), chosen, layout, out, LONG, lambda report: None)
        assert outcome.starved == 0
        assert outcome.notes == ()
        lost[method] = error_of(source, out, LONG)
    print(lost)
    assert lost["gptq"] < 0.9 * lost["rtn"]
    assert lost["awq"] < lost["rtn"]


def test_an_expert_learns_from_its_own_rows(tmp_path: Path) -> None:
    """The losses that are told are those on the rows routed to the expert, with what came before
    quantized already; and each is less than by rounding to nearest."""
    source = random_folder("mixtral", tmp_path / "source")
    checkpoint = load(source)
    told: dict[tuple[int, str], list[float]] = {}

    def progress(report: Report) -> None:
        if report.loss is not None and not report.last:
            told.setdefault((report.layer, report.role), []).append(report.loss)

    chosen, format = recipe("gptq")
    quantize(checkpoint, chosen, format, tmp_path / "out", LONG, progress)
    program = families.program(checkpoint.config)
    before, layers = split(program)
    after = weights_of(load(tmp_path / "out"))
    weights, values = weights_of(checkpoint), dict[str, Float32]()
    evaluate.run(before, program.config, weights, values, LONG)
    layer, experts = layers[0], checkpoint.config.experts
    assert experts is not None
    done = 0
    for shared in layer.inputs:
        evaluate.run(layer.ops[done : shared.first], program.config, after, values)
        done = shared.first
        if shared.expert is None:
            continue
        role = shared.roles[0]
        width = program.weights[role][1]
        numbers, rows = slots(values[shared.x], values[shared.route], experts, width)
        moments = Moments(width)
        moments.add(rows[numbers == shared.expert])
        loss = relative_loss(weights[role], after[role], moments.second)
        name = f"{shared.expert}" if "exps" in role else role
        assert np.isclose(told[0, name], loss, rtol=1e-3).any(), (role, loss, told[0, name])


def test_who_has_seen_too_little_is_counted(tmp_path: Path) -> None:
    source = random_folder("qwen3moe", tmp_path / "source")
    few = SAMPLES[:1, :16]
    outcome = make_on(source, tmp_path / "out", few)
    experts = load(source).config.experts
    counts = routed(source, few)
    expected = sum(int((each < SEEN * 64).sum()) for each in counts)
    assert expected > 0
    assert outcome.starved == expected
    assert f"{expected} of {len(counts) * experts.count} experts" in outcome.notes[0]
    assert np.isfinite(logits_of(load(tmp_path / "out"))).all()
    # Also when the layers were done before an interruption.
    with pytest.raises(Stop):
        make_on(source, tmp_path / "again", few, progress=stop_at(1, "attn_q"))
    resumed = make_on(source, tmp_path / "again", few)
    assert resumed.starved == expected
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


def make_on(source: Path, out: Path, samples: Any, progress: Any = lambda report: None) -> Any:
    chosen, format = recipe("awq")
    return quantize(load(source), chosen, format, out, samples, progress)


def routed(source: Path, samples: Any) -> list[Any]:
    """How many rows go to each expert, layer by layer, in the model as it is."""
    checkpoint = load(source)
    program = families.program(checkpoint.config)
    weights, experts = weights_of(checkpoint), checkpoint.config.experts
    assert experts is not None
    values: dict[str, Float32] = {}
    before, layers = split(program)
    evaluate.run(before, program.config, weights, values, samples)
    found = []
    for layer in layers:
        evaluate.run(layer.ops, program.config, weights, values)
        chosen = values["route"][..., : experts.chosen].astype(int)
        found.append(np.bincount(chosen.reshape(-1), minlength=experts.count))
    return found


def test_an_expert_that_saw_nothing(tmp_path: Path) -> None:
    """Its down projection is rounded to nearest, its gate and up for the rows of all."""
    source = random_folder("mixtral", tmp_path / "source")
    checkpoint = load(source)
    one = np.full((1, 16), 7, np.int32)  # every row alike: they all go to the same experts
    chosen, format = recipe("gptq", symmetric=True)
    outcome = quantize(checkpoint, chosen, format, tmp_path / "out", one, lambda report: None)
    counts = routed(source, one)
    assert outcome.starved >= sum(int((each == 0).sum()) for each in counts) > 0
    after, before = weights_of(load(tmp_path / "out")), weights_of(checkpoint)
    make(source, tmp_path / "nearest", symmetric=True)
    nearest = weights_of(load(tmp_path / "nearest"))
    for expert in np.flatnonzero(counts[0] == 0):
        role = f"layers.0.ffn_down_exps.{expert}"
        assert np.array_equal(after[role], nearest[role])
        assert not np.array_equal(after[role], before[role])


def test_starved_experts_are_part_of_the_state(tmp_path: Path) -> None:
    source = random_folder("qwen3moe", tmp_path / "source")
    chosen, _ = recipe("gptq")
    quantizer = Quantizer(load(source), chosen, SAMPLES[:1, :16], lambda role, values: values)
    state = State(tmp_path / "state", quantizer.settings(), chosen.scheme)
    quantizer.run(state, lambda report: None)
    layers = range(len(quantizer.config.layers))
    assert [len(state.load(layer).starved) for layer in layers] == quantizer.starved
    state.close()


@pytest.mark.parametrize(("name", "out"), [("mixtral", "gptq"), ("qwen3moe", "out.gguf")])
def test_the_commands(name: str, out: str, tmp_path: Path) -> None:
    source = recorded("gpt2", tmp_path / "source", family=name)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, number 7 of 19. " * 60)
    arguments = ["--bits", 8, "--group-size", 32, "--calibration", text, "--seq-len", 64]
    done = run("quantize", source, *arguments, "--json", "-o", tmp_path / out)
    assert strict_json.loads(done)["starved_experts"] == 0
    against = ["--against", source, "--text", text, "--json"]
    report = strict_json.loads(run("fidelity", tmp_path / out, *against))
    found = report["variants"][0] if "variants" in report else report
    assert 0 <= found["kl_mean"] < 0.03
    assert found["top1_agreement"] > 0.8


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout
