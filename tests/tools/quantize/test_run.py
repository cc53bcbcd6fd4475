"""A run from start to end: resumed after an interruption, refused where it must be."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.loader import load
from octavo.loader.base import Weight
from octavo.loader.pull import PullError, resolve
from octavo.tools.quantize import quantizer as quantizers
from octavo.tools.quantize import state as states
from octavo.tools.quantize.calibrate import CalibrationError, samples
from octavo.tools.quantize.quantize_checkpoint import WORK, quantize
from octavo.tools.quantize.quantizer import Quantizer, Report
from octavo.tools.quantize.state import QuantizeError
from oracle.tiny_folders import folder, talking_folder
from paths import ORACLE
from tools.quantize.quantizing import (
    SAMPLES,
    logits_of,
    make,
    qwen3_folder,
    random_folder,
    recipe,
    weights_of,
)

GGUF = ORACLE / "tiny-llama-legacy.gguf"  # of two layers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return qwen3_folder(tmp_path / "source")


class Stop(BaseException):
    """Like Ctrl-C."""


def digests(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def stop_at(layer: int, role: str) -> Any:
    def progress(report: Report) -> None:
        if (report.layer, report.role) == (layer, role) and not report.last:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """The digests of what a method makes of the source when nothing interrupts it."""

    @cache
    def made(method: str = "rtn") -> dict[str, str]:
        path = tmp_path_factory.mktemp(method)
        make(qwen3_folder(path / "source"), path / "out", method=method)
        return digests(path / "out")

    return made


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("role", ["attn_q", "ffn_down"])
def test_a_resumed_run_gives_the_same_bytes(
    method: str, role: str, tmp_path: Path, source: Path, whole: Callable[..., dict[str, str]]
) -> None:
    with pytest.raises(Stop):
        make(source, tmp_path / "out", method=method, progress=stop_at(1, role))
    assert (tmp_path / "out" / WORK / "layer-0000.npz").exists()
    assert not (tmp_path / "out" / "config.json").exists()
    seen: list[Report] = []
    make(source, tmp_path / "out", method=method, progress=seen.append)
    assert {report.layer for report in seen if report.role} == {1}  # the first is not done again
    assert digests(tmp_path / "out") == whole(method)


def test_a_resumed_gguf_is_the_same_file(tmp_path: Path) -> None:
    how: dict[str, Any] = {"method": "gptq", "format": "gguf"}
    make(GGUF, tmp_path / "whole.gguf", **how)
    with pytest.raises(Stop):
        make(GGUF, tmp_path / "out.gguf", progress=stop_at(1, "ffn_up"), **how)
    assert not (tmp_path / "out.gguf").exists()
    make(GGUF, tmp_path / "out.gguf", **how)
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"out.gguf", "whole.gguf"}


def test_writing_can_fail_and_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(GGUF, tmp_path / "whole")
    real = states.State.load

    def full(self: states.State, layer: int) -> Any:
        if layer == 1:
            raise OSError(28, "No space left on device")
        return real(self, layer)

    monkeypatch.setattr(states.State, "load", full)
    with pytest.raises(OSError, match="No space"):
        make(GGUF, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors*"))
    monkeypatch.undo()
    seen: list[Report] = []
    make(GGUF, tmp_path / "out", progress=seen.append)
    assert not any(report.role for report in seen)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_other_settings_do_not_go_on(tmp_path: Path, source: Path) -> None:
    with pytest.raises(Stop):
        make(source, tmp_path / "out", method="gptq", progress=stop_at(1, "attn_q"))
    with pytest.raises(QuantizeError, match=r'method "gptq" → "awq"'):
        make(source, tmp_path / "out", method="awq")
    with pytest.raises(QuantizeError, match="symmetric"):
        make(source, tmp_path / "out", method="gptq", symmetric=True)
    chosen, format = recipe("gptq")
    with pytest.raises(QuantizeError, match="calibration"):
        quantize(load(source), chosen, format, tmp_path / "out", SAMPLES + 1, lambda report: None)
    make(source, tmp_path / "out", method="gptq")


def test_another_model_does_not_go_on(tmp_path: Path, source: Path) -> None:
    with pytest.raises(Stop):
        make(source, tmp_path / "out", progress=stop_at(1, "attn_q"))
    with pytest.raises(QuantizeError, match="model"):
        make(GGUF, tmp_path / "out")


def test_damaged_work_is_named(tmp_path: Path, source: Path) -> None:
    with pytest.raises(Stop):
        make(source, tmp_path / "out", progress=stop_at(1, "attn_q"))
    layer = tmp_path / "out" / WORK / "layer-0000.npz"
    layer.write_bytes(layer.read_bytes()[:1000])
    with pytest.raises(QuantizeError, match=r"layer-0000\.npz: is damaged"):
        make(source, tmp_path / "out")


def interrupted(tmp_path: Path, **how: Any) -> tuple[Path, Path]:
    """A source, and the work folder of a run that has one of its two layers."""
    source = qwen3_folder(tmp_path / "source")
    with pytest.raises(Stop):
        make(source, tmp_path / "out", progress=stop_at(1, "attn_q"), **how)
    return source, tmp_path / "out" / WORK


def test_layers_of_unknown_settings_are_not_used(tmp_path: Path) -> None:
    source, work = interrupted(tmp_path)
    (work / "state.json").unlink()
    with pytest.raises(QuantizeError, match=r"holds layers but no state\.json"):
        make(source, tmp_path / "out", symmetric=True)


@pytest.mark.parametrize("what", ["empty", "part", "other run", "other layer"])
def test_a_layer_file_is_used_by_its_own_run_only(what: str, tmp_path: Path) -> None:
    source, work = interrupted(tmp_path)
    file = work / "layer-0000.npz"
    if what == "empty":
        np.savez(file)
    elif what == "part":
        with np.load(file) as data:
            np.savez(file, **{key: data[key] for key in data.files if "attn_q|step" not in key})
    elif what == "other run":
        (tmp_path / "b").mkdir()
        _, other = interrupted(tmp_path / "b", method="gptq")
        file.write_bytes((other / file.name).read_bytes())
    else:
        (work / "layer-0001.npz").write_bytes(file.read_bytes())
        file = work / "layer-0001.npz"
    with pytest.raises(QuantizeError, match=rf"{file.name}: is damaged \(it is not what this run"):
        make(source, tmp_path / "out")


def test_a_kill_while_work_is_removed_leaves_a_run_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, whole: Callable[..., Any]
) -> None:
    real = Path.unlink

    def killed(self: Path, missing_ok: bool = False) -> None:
        if self.name == "layer-0000.npz":
            raise Stop
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(Stop):
        make(source, tmp_path / "out")
    monkeypatch.undo()
    left = {path.name for path in (tmp_path / "out" / WORK).iterdir()}
    assert left == {"lock", "state.json", "layer-0000.npz"}
    make(source, tmp_path / "out")
    assert digests(tmp_path / "out") == whole()


def test_what_is_whole_is_not_written_over(tmp_path: Path, source: Path) -> None:
    """Not where a kill left an empty work folder in it."""
    make(source, tmp_path / "out")
    (tmp_path / "out" / WORK).mkdir()
    with pytest.raises(QuantizeError, match="holds no interrupted run"):
        make(source, tmp_path / "out", symmetric=True)


def test_a_work_folder_that_is_a_link_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WORK).symlink_to(tmp_path / "theirs")
    with pytest.raises(QuantizeError, match="is a symbolic link"):
        make(source, tmp_path / "out")
    assert not list((tmp_path / "theirs").iterdir())


def test_the_source_folder_is_not_written_into(source: Path) -> None:
    with pytest.raises(QuantizeError, match="lies in the source folder"):
        make(source, source / "small")
    assert not (source / "small").exists()


def fault_of(state: states.State) -> str | None:
    try:
        state.load(0)
    except QuantizeError as error:
        return str(error)
    return None


def test_any_damage_to_work_is_named(tmp_path: Path, source: Path) -> None:
    """Changed bytes and cut ends, in headers, directory and contents."""
    with pytest.raises(Stop):
        make(source, tmp_path / "out", method="gptq", progress=stop_at(1, "attn_q"))
    layer = tmp_path / "out" / WORK / "layer-0000.npz"
    good, rng = layer.read_bytes(), np.random.default_rng(0)
    chosen, _ = recipe("gptq")
    settings = json.loads((layer.parent / "state.json").read_text())
    state = states.State(layer.parent, settings, chosen.scheme)
    assert fault_of(state) is None
    named = 0
    for number in range(150):
        content = bytearray(good)
        if number % 5:  # most of what tells how to read it is at the end
            for at in rng.integers(0, len(good), 2).tolist() + rng.integers(1, 1500, 2).tolist():
                content[-at] = int(rng.integers(256))
        else:
            del content[int(rng.integers(len(good))) :]
        layer.write_bytes(content)
        if fault := fault_of(state):
            assert f"{layer}: is damaged" in fault
            named += 1
    assert named > 100
    state.close()


def test_a_weight_that_changed_is_another_model(source: Path) -> None:
    """Not in its first row only."""
    chosen, _ = recipe("rtn")

    def model(checkpoint: Any) -> Any:
        quantizer = Quantizer(checkpoint, chosen, None, lambda role, values: values)
        return quantizer.settings()["model"]

    assert model(load(source)) == model(load(source))
    found = {model(spoilt("layers.1.ffn_up", where, 2.0, source)) for where in (0, 70, 96 * 64 - 1)}
    assert len(found) == 3


def test_every_byte_of_a_large_weight_tells_models_apart(
    monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    monkeypatch.setattr(quantizers, "_DIGEST_BYTES", 1000)  # several rows at a time
    chosen, _ = recipe("rtn")
    checkpoint = load(source)
    role = "layers.1.ffn_up"
    weight, found = checkpoint.weights[role], set()
    for at in range(0, weight.nbytes, 997):
        data = weight.data.copy()
        data[at] ^= 1
        changed = checkpoint.weights | {role: weight._replace(source=data)}
        quantizer = Quantizer(replace(checkpoint, weights=changed), chosen, None, lambda r, v: v)
        found.add(quantizer.settings()["model"])
    assert len(found) == len(range(0, weight.nbytes, 997))


def test_a_model_with_biases_is_the_same_in_another_process(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom octavo.loader import load\n"
        "from octavo.tools.quantize.quantizer import Method, Quantizer, Recipe\n"
        "from octavo.tools.quantize.layouts import Format, scheme_of\n"
        "recipe = Recipe(Method.RTN, scheme_of(Format.GPTQ, 4, None, False))\n"
        "model = load(Path(sys.argv[1]))\n"
        "print(Quantizer(model, recipe, None, lambda role, values: values).settings()['model'])"
    )
    source = random_folder("qwen2", tmp_path / "source")
    found = set()
    for seed in "123":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(source)]
        found.add(subprocess.check_output(command, env=environment, text=True))
    assert len(found) == 1


def test_an_empty_folder_of_the_user_s_stays(tmp_path: Path, source: Path) -> None:
    for name in ("mine", "made"):
        if name == "mine":
            (tmp_path / name).mkdir()
        with pytest.raises(Stop):
            make(source, tmp_path / name, progress=stop_at(0, "attn_q"))
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "made").exists()


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    def again(report: Report) -> None:
        make(GGUF, tmp_path / "out")

    with pytest.raises(QuantizeError, match="another process"):
        make(GGUF, tmp_path / "out", progress=again)


def test_places_that_are_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(QuantizeError, match="holds no interrupted run"):
        make(GGUF, tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantizeError, match="no folder"):
        make(GGUF, tmp_path / "file")
    (tmp_path / "old.gguf").write_text("")
    with pytest.raises(QuantizeError, match="exists already"):
        make(GGUF, tmp_path / "old.gguf", format="gguf")
    make(GGUF, tmp_path / "out")
    with pytest.raises(QuantizeError, match="holds no interrupted run"):
        make(GGUF, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    make(GGUF, tmp_path / "empty")


def test_too_little_room_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(QuantizeError, match="1000 B are free"):
        make(GGUF, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_groups_that_do_not_divide(tmp_path: Path, source: Path) -> None:
    with pytest.raises(
        QuantizeError,
        match=r"source: model\.layers\.0\.mlp\.down_proj\S* has 96 inputs, .*group size 64",
    ):
        make(source, tmp_path / "out", group=64)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors"])
def test_inputs_that_the_engine_does_not_take(layout: str, tmp_path: Path) -> None:
    source = folder("llama", tmp_path / "source", bf16=True)  # 48 wide in the feed-forward layers
    with pytest.raises(
        QuantizeError, match=r"layers\.0\.mlp\.down_proj\S* has 48 inputs, not a mul"
    ):
        make(source, tmp_path / "out", format=layout, group=None, symmetric=layout != "awq")
    assert not (tmp_path / "out").exists()


def test_outputs_that_the_layout_has_no_place_for(tmp_path: Path, source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {"head_dim": 10, "num_key_value_heads": 2}  # 20 outputs of k and v, 40 of q
    (source / "config.json").write_text(json.dumps(config))
    for name, value in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = value[: 40 if "q_proj" in name else 20].copy()
        elif name.endswith("o_proj.weight"):
            tensors[name] = value[:, :40].copy()
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = value[:10].copy()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizeError, match=r"layers\.0\.self_attn\.k_proj\S* has 20 outputs"):
        make(source, tmp_path / "out", method="awq", format="awq", group=None)
    assert not (tmp_path / "out").exists()


def spoilt(role: str, where: int, value: float, path: Path) -> Any:
    """A checkpoint with one weight that is no number, or enormous."""
    checkpoint = load(path)
    weight = checkpoint.weights[role]
    values = weights_of(checkpoint)[role].copy()
    values.flat[where] = value
    from octavo.loader.base import WeightFormat

    bad = Weight(weight.name, WeightFormat.F32, weight.shape, values.view(np.uint8).reshape(-1))
    return replace(checkpoint, weights=checkpoint.weights | {role: bad})


def test_numbers_that_are_none_are_named(tmp_path: Path, source: Path) -> None:
    chosen, format = recipe("gptq")
    for method in ("gptq", "rtn", "awq"):
        bad = spoilt("layers.1.ffn_up", 5, np.nan, source)
        with pytest.raises(QuantizeError) as caught:
            quantize(
                bad, recipe(method)[0], format, tmp_path / method, SAMPLES, lambda report: None
            )
        name = "model.layers.1.mlp.up_proj.weight"
        assert str(caught.value) == f"{source}: {name}: has weights that are no numbers"
    # Weights that are finite and make values that are not.
    other = tmp_path / "other"
    with pytest.raises(
        QuantizeError, match=r"layers\.0\.mlp\.gate_proj\S*: its inputs.*not all finite"
    ):
        quantize(
            spoilt("layers.0.ffn_norm", 3, 3e38, source), chosen, format, other, SAMPLES,
            lambda report: None,
        )  # fmt: skip


def test_texts_to_calibrate_with() -> None:
    checkpoint = load(GGUF)
    with pytest.raises(CalibrationError, match="0 tokens to calibrate with, fewer than 16"):
        samples(checkpoint.tokenizer, "", 4, 32, "nothing.txt")
    text = "abc " * 400
    ids = checkpoint.tokenizer.encode(text)
    found = samples(checkpoint.tokenizer, text, 4, 32)
    assert found.shape == (4, 32)
    assert samples(checkpoint.tokenizer, text, 4, 10**6).shape[0] == 1
    start = ids[: len(ids) - len(checkpoint.tokenizer.encode(text, add_special_tokens=False))]
    assert all(row[: len(start)].tolist() == start for row in found)


def test_looking_needs_a_text() -> None:
    chosen, _ = recipe("awq")
    with pytest.raises(QuantizeError, match="needs a calibration text"):
        Quantizer(load(GGUF), chosen, None, lambda role, values: values)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"), [(4, True, "Q4_0"), (4, False, "Q4_1"), (8, True, "Q8_0")]
)
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_gguf(bits: int, symmetric: bool, kind: str, method: str, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    make(GGUF, out, method=method, format="gguf", bits=bits, symmetric=symmetric)
    before, after = load(GGUF), load(out)
    assert after.config == before.config
    for role, weight in after.weights.items():
        layer = role.startswith("layers.") and len(weight.shape) == 2
        assert weight.format.name == (kind if layer else before.weights[role].format.name), role
        if not layer and len(weight.shape) == 2:
            assert np.array_equal(weight.data, before.weights[role].data)
    error = np.abs(logits_of(after) - logits_of(before)).mean() / logits_of(before).std()
    assert error < (0.05 if bits == 8 else 0.25)
    old, new = dict(keys(GGUF)), dict(keys(out))
    assert {key for key in old if old[key] != new.get(key)} <= {
        "general.file_type", "general.quantization_version",
    }  # fmt: skip


def keys(path: Path) -> list[tuple[str, bytes]]:
    from octavo.tools.quantize.gguf_copy import spans

    return spans(path)


# ── The command ─────────────────────────────────────────────────────────────────────────────────


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "octavo.tools.quantize.quantizer.INPUTS", 16
    )  # the tiny model has layers of 48
    source = talking_folder(tmp_path / "source")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    result = command(
        source, "--method", "gptq", "--group-size", "-1", "--calibration", text, "--seq-len", 64,
        "--json", "-o", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = strict_json.loads(result.stdout)
    assert facts["format"] == "gptq"
    assert facts["bits"] == 4
    assert 0.5 < facts["bytes_per_weight"] < 2.0
    assert load(tmp_path / "out").quantization is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group-size", "48"], "neither -1 nor a multiple of 32"),
        (["--bits", "5"], "'5'"),
        (["--format", "awq", "--bits", "8"], "4 bits only"),
        (["--format", "awq", "--symmetric"], "asymmetric"),
        (["--format", "gguf"], "do not go together"),
        (["--method", "magic"], "magic"),
        (["--calibration", "nowhere.txt"], "nowhere.txt"),
        (["--method", "rtn", "--calibration", "a.txt"], "rtn makes no use of it"),
        (["--method", "rtn", "--num-samples", "64"], "rtn makes no use of it"),
        (["--method", "rtn", "--seq-len", "512"], "rtn makes no use of it"),
        (["--method", "awq", "--act-order", "static"], "awq makes no use of it"),
        (["--method", "awq", "--scales", "mse"], "awq makes no use of it"),
        (["--method", "rtn", "--damping", "0.01"], "rtn makes no use of it"),
        (["--seq-len", "32768"], "32768 tokens are more than the model's context of"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = command(GGUF, *arguments, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_flags_that_gguf_has_not_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = command(GGUF, "--bits", 8, "--asymmetric", "-o", out)
    assert result.exit_code == 2
    assert "(Q8_0) are symmetric" in " ".join(result.output.replace("│", " ").split())
    # Its blocks are of neighbours: groups in another order would be written as if they were.
    with pytest.raises(QuantizeError, match="--act-order group"):
        make(GGUF, out, method="gptq", format="gguf", order="group")
    assert not out.exists()


def test_an_empty_out_is_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(GGUF, "--method", "rtn", "-o", "")
    assert result.exit_code == 2
    assert "it is empty" in result.output
    assert not list(tmp_path.iterdir())


def test_what_was_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that is more than the model's context is cut, and said to be."""
    monkeypatch.setattr(
        "octavo.tools.quantize.quantizer.INPUTS", 16
    )  # the tiny model has layers of 48
    source = talking_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    result = command(
        source, "--group-size", -1, "--num-samples", 2, "--json", "-o", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert "context is 128 tokens: the text's pieces are of 128, not of 512" in result.stderr
    facts = strict_json.loads(result.stdout)
    assert (facts["num_samples"], facts["seq_len"]) == (2, 128)


def test_an_interrupted_out_is_named_where_it_is_used(tmp_path: Path) -> None:
    source, work = interrupted(tmp_path)
    with pytest.raises(PullError, match="quantize run was interrupted"):
        resolve(str(work.parent))
    with pytest.raises(Stop):
        make(GGUF, tmp_path / "out.gguf", format="gguf", progress=stop_at(1, "attn_q"))
    with pytest.raises(PullError, match=r"out\.gguf: an octavo quantize run was interrupted"):
        resolve(str(tmp_path / "out.gguf"))
    make(source, tmp_path / "out")
    assert resolve(str(tmp_path / "out")) == (tmp_path / "out").resolve()


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, source: Path, whole: Callable[..., Any]) -> None:
    script = (
        "import os, signal; from octavo.tools.quantize import state; real = state.State.save\n"
        "def save(self, layer, result):\n"
        "    real(self, layer, result)\n"
        "    if layer == 0: os.kill(os.getpid(), signal.SIGINT)\n"
        "state.State.save = save\n"
        "from octavo.cli import main; main()"
    )
    arguments = ["quantize", str(source), "--method", "rtn", "--group-size", "32"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 130, done.stderr
    assert "the same command goes on from there" in done.stderr
    assert (tmp_path / "out" / WORK / "layer-0000.npz").exists()
    result = command(*arguments[1:], "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert digests(tmp_path / "out") == whole()
