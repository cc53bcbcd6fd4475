"""The certificate: everything tried, what was found, and whether it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.config import DoesNotFit, EngineConfig
from octavo.kv_cache.layout import KvDtype
from octavo.loader.base import Checkpoint
from octavo.spec_decode.config import SpeculativeConfig
from octavo.tools.verify import bits, distribution, guessing
from octavo.tools.verify.faults import FlippedBit, WrongGuess
from octavo.tools.verify.trials import trials

Progress = Callable[[str], None]

FLIPPED_BIT = "one bit of one logit flipped, in the crowd"
WRONG_GUESS = "one wrong guess let stand"
WRONG_RULE = "rejected guesses replaced by draws from p, not from max(0, p - q)"


@dataclass(slots=True)
class Drafted:
    """What was found of one drafter."""

    method: SpeculativeConfig
    guessing: guessing.Guessing
    distribution: distribution.Distribution
    least_p: float  # below it a distribution counts as wrong

    @property
    def problems(self) -> list[str]:
        found = self.guessing
        problems = []
        if not found.greedy_equal:
            problems.append(f"greedy answers differ: {found.first}")
        if not found.replay_equal:
            problems.append(f"drawn answers differ: {found.first}")
        if found.differing_bits:
            problems.append(f"{found.differing_bits} bits of logits differ: {found.first}")
        if found.missed:
            problems.append(found.missed)
        tests = self.distribution
        if tests.missed:
            problems.append(f"by rejection {tests.missed}")
        elif tests.chi_square_p < self.least_p:
            p = f"p = {tests.chi_square_p:.1e}"
            problems.append(f"by rejection the output has another distribution: {p}")
        if not tests.missed and tests.wrong_rule_p >= self.least_p:
            p = f"p = {tests.wrong_rule_p:.1e}"
            problems.append(f"the test does not notice a wrong rule of rejection: {p}")
        return problems

    def as_dict(self) -> dict[str, Any]:
        return self.guessing.as_dict() | self.distribution.as_dict() | {"problems": self.problems}


@dataclass(slots=True)
class Certificate:
    """``ok`` if nothing differed and everything happened that should have, of what was tried:
    ``left_out`` are drafters that do not fit in the memory of this machine.
    """

    model: str
    isa: str
    threads: int  # of all but the reference, which has one
    kv_cache_dtype: str
    conditions: list[bits.Condition] = field(default_factory=list)
    drafters: dict[str, Drafted] = field(default_factory=dict)
    planted: dict[str, bool] = field(default_factory=dict)  # fault -> found
    left_out: dict[str, str] = field(default_factory=dict)  # drafter -> why it was not tried
    seconds: float = 0.0

    @property
    def differing_bits(self) -> int:
        return sum(each.differing_bits for each in self.conditions) + sum(
            each.guessing.differing_bits for each in self.drafters.values()
        )

    @property
    def cases(self) -> int:
        """Answers that were compared with those of the same requests alone."""
        return sum(each.cases for each in self.conditions) + sum(
            each.guessing.cases for each in self.drafters.values()
        )

    @property
    def rows(self) -> int:
        """Rows of logits, compared bit by bit."""
        return sum(each.rows for each in self.conditions) + sum(
            each.guessing.rows for each in self.drafters.values()
        )

    @property
    def problems(self) -> list[str]:
        problems = []
        for each in self.conditions:
            if each.differing_bits:
                bits = f"{each.differing_bits} bits of logits differ"
                problems.append(f"{each.name}: {bits}: {each.first}")
            elif not each.equal:
                problems.append(f"{each.name}: the answers differ")
            if each.missed:
                problems.append(f"{each.name}: {each.missed}")
        for name, drafted in self.drafters.items():
            problems += [f"{name}: {problem}" for problem in drafted.problems]
        return problems

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def overlooked(self) -> list[str]:
        """Faults that were planted and not found."""
        return [fault for fault, found in self.planted.items() if not found]

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "ok": self.ok,
            "model": self.model,
            "isa": self.isa,
            "threads": self.threads,
            "kv_cache_dtype": self.kv_cache_dtype,
            "differing_bits": self.differing_bits,
            "cases": self.cases,
            "rows": self.rows,
            "conditions": {each.name: each.as_dict() for each in self.conditions},
            "drafters": {name: each.as_dict() for name, each in self.drafters.items()},
            "left_out": self.left_out,
            "problems": self.problems,
            "seconds": round(self.seconds, 1),
        }
        if self.planted:
            result["planted"] = [
                {"fault": fault, "found": found} for fault, found in self.planted.items()
            ]
        return result


def methods(
    checkpoint: Checkpoint, config: EngineConfig, given: Sequence[SpeculativeConfig]
) -> dict[str, SpeculativeConfig]:
    """The drafters to be had for any model, and those given, by name; a given one takes the place
    of that of the same method.
    """
    layers = len(checkpoint.config.layers)
    named = {
        "ngram": SpeculativeConfig(method="ngram"),
        "suffix": SpeculativeConfig(method="suffix"),
        "suffix, branches": SpeculativeConfig(method="suffix", suffix_decoding_alternatives=2),
        "draft_model": SpeculativeConfig(
            method="draft_model", model=str(checkpoint.path), quantization=config.quantization
        ),
    }
    shares = [layer.shares for layer in checkpoint.config.layers]
    some = [index for index in range(layers) if index % 4 != 2]
    some = [index for index in some if shares[index] is None or shares[index] in some]
    if len(some) < layers:
        named["layer_skip"] = SpeculativeConfig(method="layer_skip", layers=some)
    if checkpoint.config.mtp_layers == 1:
        named["mtp"] = SpeculativeConfig(method="mtp")
    defaults = set(named)
    for method in given:
        name, count = method.method, 1
        while name in named and name not in defaults:
            count += 1
            name = f"{method.method} {count}"
        named[name] = method
        defaults.discard(name)
    return named


def certify(
    checkpoint: Checkpoint,
    config: EngineConfig,
    given: Sequence[SpeculativeConfig] = (),
    *,
    draws: int,
    plant_faults: bool = False,
    progress: Progress = lambda _: None,
) -> Certificate:
    """Try everything on the model with these settings, and the rule `rejection` with ``draws``
    draws at each of several positions for each drafter. ``plant_faults`` plants one of each kind.

    Raises what `load_engine` does, for the drafters ``given`` before anything is tried, and
    `VerificationError` if a trial cannot be run.
    """
    started = time.monotonic()
    named = methods(checkpoint, config, given)
    requests = trials(checkpoint)
    for method in given:
        progress(f"loads {method.describe()}")
        guessing.load(checkpoint, bits.sized(config, requests), method)
    progress("alone: the answers to compare with")
    reference = bits.Reference(checkpoint, config, requests)
    threads = bits.threads_of(config)
    dtype = KvDtype.of(config.kv_cache_dtype)
    model = checkpoint.config.name or checkpoint.path.name
    certificate = Certificate(model, reference.isa, threads, str(dtype))
    for circumstance in bits.circumstances(checkpoint, reference.config):
        progress(f"bits of logits: {circumstance.name}")
        flipped = FlippedBit() if plant_faults and circumstance.name == "crowded" else None
        condition = bits.compare(checkpoint, reference, circumstance, flipped)
        certificate.conditions.append(condition)
        if flipped:
            certificate.planted[FLIPPED_BIT] = condition.differing_bits == 1
    least_p = distribution.FAILURES / len(named)
    for name, method in named.items():
        progress(f"drafts by {name}")
        planted = plant_faults and name == next(iter(named))
        try:
            drafted = _drafted(checkpoint, reference, method, draws, least_p, planted)
        except DoesNotFit as error:
            if method in given:
                raise
            certificate.left_out[name] = str(error)
            continue
        certificate.drafters[name] = drafted
        if planted:
            found = drafted.guessing
            certificate.planted[WRONG_GUESS] = not (found.greedy_equal and found.replay_equal)
            certificate.planted[WRONG_RULE] = drafted.distribution.chi_square_p < least_p
    certificate.seconds = time.monotonic() - started
    return certificate


def _drafted(
    checkpoint: Checkpoint,
    reference: bits.Reference,
    method: SpeculativeConfig,
    draws: int,
    least_p: float,
    planted: bool,
) -> Drafted:
    wrong = WrongGuess() if planted else None
    found = guessing.compare(checkpoint, reference, method, wrong)
    tests = distribution.verify(
        checkpoint, reference.config, reference.trials, method, draws, fault=planted
    )
    return Drafted(method, found, tests, least_p)
