"""What predictions assume of GPUs is what the published runs say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_fit
from octavo.tools.plan.gpu import FITTED, LARGE_ERROR, TYPICAL_ERROR


@pytest.fixture(scope="module")
def runs() -> list[gpu_fit.Run]:
    return gpu_fit.load()[1]


def test_the_constants_are_the_fits(runs: list[gpu_fit.Run]) -> None:
    assert gpu_fit.fit(runs) == pytest.approx(FITTED, rel=0.01)


def test_the_errors_that_are_printed_are_those_on_sources_left_out(
    runs: list[gpu_fit.Run],
) -> None:
    off = np.abs(np.concatenate(list(gpu_fit.left_out(runs).values())))
    assert float(np.median(off)) == pytest.approx(TYPICAL_ERROR, abs=0.01)
    assert float(np.quantile(off, 0.9)) == pytest.approx(LARGE_ERROR, abs=0.015)


def test_runs_are_predicted_as_the_planner_does(runs: list[gpu_fit.Run]) -> None:
    for run in runs:
        assert run.predicted(FITTED) == pytest.approx(run.planned(FITTED), rel=1e-6)


def test_each_run_has_a_source_and_quotes_its_figure() -> None:
    facts = json.loads(gpu_fit.RUNS.read_text())
    assert {run["source"] for run in facts["runs"]} == set(facts["sources"])
    for source in facts["sources"].values():
        assert source["url"].startswith("https://")
        assert source["software"]
    for run in facts["runs"]:
        quoted = run["quote"].replace(",", "")
        assert any(f"{run['value']:{how}}" in quoted for how in ("", "g", ".2f")), run


def test_there_are_runs_enough(runs: list[gpu_fit.Run]) -> None:
    assert len(runs) >= 12
    assert len({run.source for run in runs}) >= 3
    assert len({run.device.name for run in runs}) >= 3
