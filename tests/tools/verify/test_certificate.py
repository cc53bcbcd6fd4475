"""The certificate holds on honest builds, and notices each kind of fault."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import octavo.loader
import strict_json
from octavo.cli import _explain, app
from octavo.cli.verify import as_text
from octavo.engine.config import EngineConfig
from octavo.executor.base import Batch, StepResult
from octavo.loader.base import Checkpoint
from octavo.sampling.params import SamplingParams, parameters
from octavo.spec_decode.config import SpeculativeConfig
from octavo.spec_decode.drafter import Draft
from octavo.tools.verify import bits, certificate, distribution, guessing
from octavo.tools.verify.certificate import (
    FLIPPED_BIT,
    WRONG_GUESS,
    WRONG_RULE,
    Certificate,
    certify,
)
from octavo.tools.verify.faults import FlippedBit
from octavo.tools.verify.running import VerificationError, running
from octavo.tools.verify.trials import COUNT, trials
from paths import ORACLE, TINY
from spec_decode.random_heads import folder


@pytest.fixture(scope="module")
def llama() -> Checkpoint:
    return octavo.loader.load(TINY)


@pytest.fixture(scope="module")
def reference(llama: Checkpoint) -> bits.Reference:
    return bits.Reference(llama, EngineConfig(), trials(llama, 6))


def circumstance(llama: Checkpoint, reference: bits.Reference, name: str) -> bits.Circumstance:
    every = bits.circumstances(llama, reference.config)
    return next(each for each in every if each.name == name)


class Mute:
    def start(self, sequence: int, token_ids: Sequence[int], cache_salt: str | None) -> None: ...
    def extend(self, sequence: int, token_ids: Sequence[int]) -> None: ...
    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        return [Draft(()) for _ in sequences]

    def end(self, sequence: int) -> None: ...


class Failing(Mute):
    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        raise RuntimeError("injected")


@pytest.fixture(scope="module")
def planted(llama: Checkpoint) -> Certificate:
    return certify(llama, EngineConfig(kv_cache_dtype="int8"), draws=1000, plant_faults=True)


def test_a_sound_build_gets_its_certificate() -> None:
    checkpoint = octavo.loader.load(ORACLE / "tiny-gemma3.gguf")
    certificate = certify(checkpoint, EngineConfig(), draws=1000)
    assert certificate.problems == []
    assert certificate.ok
    assert certificate.differing_bits == 0
    assert certificate.left_out == {}
    drafters = {"ngram", "suffix", "suffix, branches", "draft_model", "layer_skip"}
    assert set(certificate.drafters) == drafters
    assert certificate.cases == 6 * 18 + len(certificate.drafters) * 32
    assert certificate.rows > 5000
    for name, drafted in certificate.drafters.items():
        found, tests = drafted.guessing, drafted.distribution
        assert found.accepted_tokens > 0
        if name != "draft_model":  # which is the model itself
            assert found.accepted_tokens < found.draft_tokens, "right and wrong guesses"
        assert tests.places > 0
        assert tests.counted >= 2 * distribution.LEAST_EXPECTED, "of the engine's answers"
        assert tests.wrong_rule_p < drafted.least_p < tests.chi_square_p


def test_each_planted_fault_is_found(planted: Certificate) -> None:
    assert planted.planted == {FLIPPED_BIT: True, WRONG_GUESS: True, WRONG_RULE: True}
    assert planted.overlooked == []
    assert not planted.ok
    assert planted.differing_bits >= 1
    crowded = next(each for each in planted.conditions if each.name == "crowded")
    assert crowded.differing_bits == 1
    assert "1 of " in crowded.first


def test_every_row_is_compared(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of a large vocabulary can be kept; a wrong bit is found in any row."""
    monkeypatch.setattr(bits, "_KEPT_BYTES", 3 * 4 * llama.config.vocab_size)
    reference = bits.Reference(llama, EngineConfig(), trials(llama, 6))
    every = sum(trial.params.n * (trial.params.max_tokens or 0) for trial in reference.trials)
    crowded = circumstance(llama, reference, "crowded")
    kept = 0
    for step in (2, 7, 12):
        condition = bits.compare(llama, reference, crowded, FlippedBit(step))
        assert (condition.rows, condition.differing_bits) == (every, 1)
        kept += "at least" not in condition.first
    assert kept < 3


def test_every_bit_is_counted(llama: Checkpoint, reference: bits.Reference) -> None:
    """Several bits of several rows, the sign of a zero among them."""
    comparison = bits.Comparison(reference)
    key = trials(llama)[0].name, 0
    row = reference.row(key, 0)
    other = reference.row(key, 1)
    assert other is not None
    comparison(key, 0, row.copy())
    assert (comparison.rows, comparison.differing_bits, comparison.first) == (1, 0, None)
    wrong = row.copy()
    wrong.view(np.uint32)[3] ^= 0b1011
    wrong.view(np.uint32)[-1] ^= 1 << 31
    comparison(key, 0, wrong)
    comparison(key, 1, other.copy())
    assert (comparison.rows, comparison.differing_rows, comparison.differing_bits) == (3, 1, 4)
    assert "logit 3" in comparison.first


def test_what_did_not_happen_is_no_proof(llama: Checkpoint, reference: bits.Reference) -> None:
    """A circumstance that did not come about, and a drafter that drafts nothing or fails."""
    preempted = circumstance(llama, reference, "preempted")
    roomy = replace(preempted, pools=(8 * preempted.pools[-1],))
    condition = bits.compare(llama, reference, roomy)
    assert condition.missed == "nobody was preempted"
    assert condition.differing_bits == 0
    together = circumstance(llama, reference, "together")
    condition = bits.compare(llama, reference, replace(together, pools=roomy.pools))
    assert condition.missed == "nobody was preempted"
    assert "0 prompt tokens" not in condition.what
    for drafter, why in ((Mute, "nothing was drafted"), (Failing, "the drafter failed")):
        method = SpeculativeConfig(method=f"{__name__}:{drafter.__name__}")
        found = guessing.compare(llama, reference, method)
        assert found.greedy_equal
        assert found.replay_equal
        assert why in found.missed


@pytest.mark.parametrize("step", [1, 3])
def test_a_wrong_token_shows_in_the_answers(
    llama: Checkpoint, reference: bits.Reference, step: int
) -> None:
    """Even one that no compared row of logits shows."""
    left = step

    def swap(batch: Batch, result: StepResult) -> StepResult:
        nonlocal left
        left -= 1
        assert result.logits is not None
        if left or not len(result.logits):
            return result
        return result._replace(logits=np.roll(result.logits, 1, axis=1))

    with running(llama, reference.config, change=swap) as engine:
        answers = engine.answers(reference.trials, COUNT)
    assert answers != reference.answers
    differing = [name for name in answers if answers[name] != reference.answers[name]]
    trial = next(each for each in reference.trials if each.name == differing[0])
    told = guessing.difference(trial, answers[trial.name], reference.answers[trial.name], COUNT)
    assert trial.name in told


def test_other_rules_are_not_meant_by_the_same_bits(
    llama: Checkpoint, reference: bits.Reference
) -> None:
    """A user's configuration may say rejection, which keeps the distribution alone."""
    method = SpeculativeConfig(method="suffix", acceptance_method="rejection")
    found = guessing.compare(llama, reference, method)
    assert found.replay_equal
    assert found.missed is None


def test_a_drafter_with_probabilities(
    llama: Checkpoint, reference: bits.Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is tried with guesses drawn from what the drafter gives; it drafts for itself."""
    method = SpeculativeConfig(method="draft_model", model=str(TINY))
    wrong = distribution.verify(llama, reference.config, reference.trials, method, 1000, fault=True)
    assert wrong.chi_square_p < 1e-8
    mute = SpeculativeConfig(method=f"{__name__}:Mute")
    none = distribution.verify(llama, reference.config, reference.trials, mute, 1000)
    assert none.missed == "nothing was drafted"
    monkeypatch.setattr(distribution, "_LEAST_ANSWERS", 0)
    few = distribution.verify(llama, reference.config, reference.trials, method, 1000)
    assert few.chi_square_p > 1e-8
    assert few.wrong_rule_p < 1e-8
    assert few.counted == 0
    assert few.missed == "too few answers of the engine were drafted for"


@pytest.mark.parametrize("recurrent", [True, False])
def test_heads_are_asked_for_what_they_can_guess(
    llama: Checkpoint, reference: bits.Reference, tmp_path: Path, recurrent: bool
) -> None:
    """Eight tokens of the vocabulary, and by heads that have learned nothing."""
    heads = folder(tmp_path / "heads", llama, recurrent=recurrent, size=8)
    method = SpeculativeConfig(method="medusa", model=str(heads))
    found = distribution.verify(llama, reference.config, reference.trials, method, 1000)
    assert found.missed is None
    assert found.counted >= 2 * distribution.LEAST_EXPECTED
    assert found.wrong_rule_p < 1e-20 < found.chi_square_p


def test_a_wrong_rule_shows_in_the_engine_alone(
    llama: Checkpoint, reference: bits.Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "_tests", lambda *_: [1.0])
    method = SpeculativeConfig(method="ngram")
    for fault in (False, True):
        found = distribution.verify(
            llama, reference.config, reference.trials, method, 1000, fault=fault
        )
        assert found.counted > 0
        assert (found.chi_square_p < 1e-8) is fault


def test_answers_of_other_tokens_cannot_come() -> None:
    group = distribution._Group([7, 2], np.array([0.1, 0.2, 0.3, 0, 0, 0, 0, 0.7]))
    for token in [7] * 500 + [2] * 200:
        group.add(token)
    assert group.counts.tolist() == [500, 200, 0]
    assert group.large
    group.add(3)
    assert group.counts.tolist() == [500, 200, 1]
    assert group.p.tolist() == [0.7, 0.3, 0.0]


def test_drafters_given_are_looked_at_first(llama: Checkpoint) -> None:
    said: list[str] = []
    typo = SpeculativeConfig(method=f"{__name__}:Muet")
    with pytest.raises(ValueError, match="Muet"):
        certify(llama, EngineConfig(), [typo], draws=1000, progress=said.append)
    assert len(said) == 1
    assert "Muet" in said[0]


def test_what_was_left_out_is_named() -> None:
    text = as_text(Certificate("m", "generic", 2, "bf16", left_out={"draft_model": "10 GB, 5 GB"}))
    assert "not tried: draft_model: 10 GB, 5 GB" in text
    assert "every drafter that was tried keeps the distribution; not tried: draft_model." in text
    assert "every drafter keeps" in as_text(Certificate("m", "generic", 2, "bf16"))


def test_exact_probabilities() -> None:
    logits = np.array([1.0, 3.0, 3.0, 0.5, -2.0], np.float32)
    for params, kept in (
        (SamplingParams(temperature=0.7), range(5)),
        (SamplingParams(temperature=2.0, top_k=1), [1]),
        (SamplingParams(temperature=2.0, allowed_token_ids=(0, 4)), [0, 4]),
        (SamplingParams(temperature=2.0, allowed_token_ids=(0, 1, 2), top_k=2), [1, 2]),
    ):
        p = distribution.probabilities(logits, params)
        assert p.sum() == pytest.approx(1)
        assert np.flatnonzero(p).tolist() == list(kept)
        ratio = np.exp((logits[kept[0]] - logits[kept[-1]]) / params.temperature)
        assert p[kept[0]] / p[kept[-1]] == pytest.approx(ratio, rel=1e-6)


def test_trials_are_of_every_kind(llama: Checkpoint) -> None:
    made = trials(llama)
    assert len({trial.name for trial in made}) == len(made) == COUNT
    assert sum(trial.greedy for trial in made) == COUNT // 2
    assert any(trial.params.n > 1 for trial in made)
    assert any(trial.params.prompt_logprobs is not None for trial in made)
    default = SamplingParams()
    native = {name for name, row in parameters().items() if row.native}
    for field in native - {"min_tokens", "allowed_token_ids", "stop_token_ids"}:
        assert any(getattr(t.params, field) != getattr(default, field) for t in made), field
    prompts = [trial.prompt_token_ids for trial in made]
    assert made == trials(llama), "the same each time"
    assert any(a[:32] == b[:32] for a in prompts for b in prompts if a is not b and len(a) > 32)
    for trial in made:
        trial.params.validated(llama.config.vocab_size)


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["verify", str(TINY), "--draws", "1000", *arguments])

    def test_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        only = {"suffix": SpeculativeConfig(method="suffix")}
        monkeypatch.setattr(certificate, "methods", lambda *_: only)
        result = self.run("--json", "--threads", "1", "--kv-cache-dtype", "int4")
        assert result.exit_code == 0, result.output
        found = strict_json.loads(result.stdout)
        assert found["differing_bits"] == 0
        assert found["cases"] > 100
        assert (found["threads"], found["kv_cache_dtype"]) == (2, "int4")
        assert found["conditions"]["threads"]["what"] == "2 threads"
        for drafter in found["drafters"].values():
            assert drafter["greedy_equal"] is True
            assert drafter["replay_equal"] is True
            assert drafter["chi_square_p"] > 1e-6
            assert drafter["wrong_rule_p"] < 1e-6
            assert drafter["engine_draws"] > 0
            assert drafter["rule_draws"] == 4000
        assert "planted" not in found

    def test_planted_faults_make_it_fail(
        self, planted: Certificate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(certificate, "certify", lambda *_, **__: planted)
        result = self.run("--plant-fault")
        assert result.exit_code == 1
        assert "NOT FOUND" not in result.stdout
        assert f"planted: {FLIPPED_BIT}: found" in result.stdout
        assert f"planted: {WRONG_GUESS}: found" in result.stdout
        assert f"planted: {WRONG_RULE}: found" in result.stdout
        assert "no certificate" in result.stdout

    def test_a_planted_fault_that_is_overlooked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a comparison that sees nothing."""
        only = {"ngram": SpeculativeConfig(method="ngram")}
        monkeypatch.setattr(certificate, "methods", lambda *_: only)
        monkeypatch.setattr(bits.Reference, "agrees", lambda *_: True)
        result = self.run("--plant-fault")
        assert result.exit_code == 2
        assert f"planted: {FLIPPED_BIT}: NOT FOUND" in result.stdout
        assert f"octavo: not found: {FLIPPED_BIT}\n" in result.stderr

    def test_a_trial_that_cannot_be_run(self) -> None:
        assert _explain(VerificationError("trial-3: it failed")) == "octavo: trial-3: it failed"

    @pytest.mark.long
    def test_a_drafter_of_ones_own(self) -> None:
        method = json.dumps({"method": f"{__name__}:Mute"})
        result = self.run("--speculative-config", method)
        assert result.exit_code == 1
        assert "nothing was drafted" in result.stdout

    @pytest.mark.parametrize("text", ['{"method": "none"}', "[]", "{"])
    def test_settings_that_say_nothing(self, text: str) -> None:
        assert self.run("--speculative-config", text).exit_code == 2
