"""octavo imatrix and octavo quantize --mix, as commands."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from octavo.cli import app
from octavo.loader import load
from octavo.tools.quantize.imatrix import read_imatrix
from paths import ORACLE
from tools.quantize.quantizing import random_folder

K = ORACLE / "tiny-llama-k.gguf"


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_matrix_is_collected_and_used(tmp_path: Path) -> None:
    matrix, out = tmp_path / "i.gguf", tmp_path / "o.gguf"
    result = command("imatrix", K, "-o", matrix, "--num-samples", "2", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["entries"] == len(read_imatrix(matrix).entries) == 8
    assert (facts["num_samples"], facts["unseen_experts_matrices"]) == (2, 0)
    mixed = ("quantize", K, "--mix", "Q3_K_S", "--imatrix", matrix, "-o", out, "--json")
    result = command(*mixed)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["mix"], facts["method"]) == ("Q3_K_S", "imatrix")
    assert load(out).weights["layers.0.ffn_up"].format.name == "Q3_K"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mix", "Q4_K_M", "--bits", "4"], "--mix makes no use of it"),
        (["--mix", "Q4_K_M", "--method", "gptq"], "--mix goes with imatrix or rtn"),
        (["--method", "imatrix"], "imatrix goes with --mix"),
        (["--mix", "Q4_K_M", "--imatrix", "none.gguf"], "no such file: none.gguf"),
        (["--mix", "Q4_K_M", "--imatrix", str(K), "--num-samples", "2"], "--imatrix makes no use"),
        (["--imatrix", str(K)], "--method gptq makes no use of it"),
        (["--bits", "3"], "GGUF has 3 bits in K-quants"),
        (["--embedding-bits", "6"], "6 bits are a K-quant's"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str, tmp_path: Path) -> None:
    result = command("quantize", K, *words, "-o", tmp_path / "o.gguf")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_model_is_no_importance_matrix(tmp_path: Path) -> None:
    words = ("--mix", "Q3_K_S", "--imatrix", K, "-o", tmp_path / "o.gguf")
    result = command("quantize", K, *words)
    assert result.exit_code == 1
    assert "no importance matrix" in str(result.exception)


@pytest.mark.parametrize("options", [["--mix", "Q4_K_M"], ["--method", "rtn"]])
def test_layers_with_convolutions_are_forecast(options: list[str], tmp_path: Path) -> None:
    model, out = random_folder("lfm2", tmp_path / "m"), tmp_path / "o.gguf"
    result = command("quantize", model, *options, "-o", out, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    parts = json.loads(result.stdout)["parts"]
    assert 0 < parts["all"]["bytes"] < parts["all"]["source_bytes"]
