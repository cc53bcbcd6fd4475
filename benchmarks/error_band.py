"""How many figures of recorded loads lie in the error band that the simulator gives them.

    python benchmarks/error_band.py [--deviations 0.041,0.06,0.09]

The loads are those of benchmarks/prediction.py as RESULTS.md has them: measured on the live engine,
and how far off the prediction with the refresh right before was. Their bands are simulated here,
with rates of a machine of that kind: everything takes as much longer, or shorter, as nine of ten
machines do whose speed has this deviation, in logarithms. A figure is within if measured ÷
predicted lies between the ends of the band ÷ the prediction. The trace's loads are left out.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import asdict, fields
from math import exp
from pathlib import Path

import octavo.loader
from octavo.executor.cost import Rates
from octavo.loader.pull import resolve
from octavo.tools.plan.band import NINE_IN_TEN, REFRESHED
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.simulation import Setup, simulate, weights_on
from octavo.tools.plan.subject import Subject
from prediction import CONFIG, At, Figures, Load, loads, timed

RATES = Rates(  # of two cores such as those of the record
    8e9, 40e9, int8_ops_per_second=170e9, bf16_ops_per_second=90e9, knee=2.0, unpacking=2.0,
    kv_bytes_per_second=8e9, attention_ops_per_second=30e9, attention_knee=1.0, threads=2,
    step_overhead=4e-4, batch_overhead=2e-4, row_overhead=3e-5, chunk_overhead=1.5e-4,
)  # fmt: skip
MODELS = "smollm2", "gemma3-270m"
PIECES, SECONDS = 3, 3.0
RESULTS = Path(__file__).with_name("RESULTS.md")
_REFRESHED = re.compile(r"\(([+−])([\d.]+)%\)")


def recorded(model: str, load: str) -> list[float]:
    """Measured ÷ predicted with the refresh before it, of each of `Figures`."""
    (row,) = [
        line
        for line in RESULTS.read_text().splitlines()
        if line.startswith(f"| {model}, {load} |") and "→" in line
    ]
    errors = [
        float(number) * (-1 if sign == "−" else 1) / 100 for sign, number in _REFRESHED.findall(row)
    ]
    assert len(errors) == len(fields(Figures))
    return [1 / (1 + error) for error in errors]


def simulated(setup: Setup, load: Load, slowness: float) -> dict[str, float]:
    def at(rates: Rates) -> At:
        return At(setup.subject, setup.stored, setup.device, CONFIG, speed=rates)

    done = []
    for turn in range(PIECES):
        piece = load.piece(turn)
        samples = timed(piece, at(RATES), SECONDS)
        slow = at(RATES.slowed(slowness))
        done.append(simulate(slow, samples, seed=piece.demand.seed).replay)
    return asdict(Figures.of(done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deviations", default=f"0.041,{REFRESHED},0.09", help="of the speed")
    deviations = [float(text) for text in parser.parse_args().deviations.split(",")]
    within: Counter[tuple[float, str]] = Counter()
    count = 0
    for model in MODELS:
        subject = Subject.of(octavo.loader.load(resolve(model)))
        device = Device("such a machine", lambda _: RATES, 1 << 40)
        setup = Setup(subject, weights_on(device, subject), device, CONFIG)
        for load in loads(None):
            ratios = recorded(model, load.name)
            middle = simulated(setup, load, 1.0)
            count += 1
            for deviation in deviations:
                end = exp(NINE_IN_TEN * deviation)
                found = [middle, *(simulated(setup, load, each) for each in (end, 1 / end))]
                for name, ratio in zip(middle, ratios, strict=True):
                    ends = [each[name] / middle[name] for each in found]
                    within[deviation, name] += min(ends) <= ratio <= max(ends)
    names = [field.name for field in fields(Figures)]
    print("| deviation | times as long | " + " | ".join(names) + " | all |")
    print("|---" * (len(names) + 3) + "|")
    for deviation in deviations:
        end = exp(NINE_IN_TEN * deviation)
        each = [within[deviation, name] for name in names]
        shown = " | ".join(f"{number} of {count}" for number in each)
        total = f"{sum(each)} of {count * len(names)}"
        print(f"| {deviation:g} | {1 / end:.2f} to {end:.2f} | {shown} | {total} |")


if __name__ == "__main__":
    main()
