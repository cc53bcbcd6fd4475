"""The roofline beside the closed form of Pope et al., and what must hold at any point of it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import strict_json
from octavo.cli import app
from octavo.engine.config import SettingsError
from octavo.executor.cost import Arithmetic, Rates
from octavo.kv_cache.layout import KvLayout
from octavo.tools.plan.gpu import FITTED
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.quantization import in_scheme
from octavo.tools.plan.roofline import Roofline, per_million, roofline
from octavo.tools.plan.schemes import scheme
from octavo.tools.plan.subject import Subject
from paths import TINY

CHIP = Device("a chip", lambda _: Rates(1e12, 2e14), 80 << 30)
LLAMA = Subject.find("llama-2-7b")  # every head has keys of its own
GROUPED = Subject.find("llama-3-8b")


def found(
    subject: Subject,
    *,
    contexts: tuple[int, ...] = (1000,),
    prompts: tuple[int, ...] = (100,),
    sequences: tuple[int, ...] = (1,),
    device: Device = CHIP,
    chunk: int | None = None,
) -> Roofline:
    return roofline(
        subject,
        in_scheme(subject, scheme("bf16"), scheme("bf16")),
        device,
        layout=KvLayout.of(subject.program.config),
        contexts=contexts,
        prompts=prompts,
        sequences=sequences,
        chunk=chunk,
    )


@pytest.mark.parametrize("sequences", [1, 16, 200])
@pytest.mark.parametrize("context", [1, 500, 4000])
def test_decode_is_the_closed_form(sequences: int, context: int) -> None:
    """2N operations a token and N weights of two bytes a step; 4·layers·heads·width operations and
    4·layers·KV heads·width bytes a token of context. N: all parameters but the embedding, of which
    a row is read.
    """
    for subject, kv_heads in ((LLAMA, 32), (GROUPED, 8)):
        n = subject.parameters - subject.program.config.vocab_size * 4096
        [point] = found(subject, contexts=(context,), sequences=(sequences,)).decode
        operations = sequences * (2 * n + 4 * 32 * 4096 * (context + 1))
        moved = 2 * n + sequences * 4 * 32 * kv_heads * 128 * (context + 2)  # and one written
        # Norms, activations and rotations are operations, too, of no matrix: a thousandth.
        assert point.phase.ops == pytest.approx(operations, rel=1e-3)
        assert point.phase.bytes == pytest.approx(moved, rel=1e-3)
        assert point.phase.intensity == pytest.approx(operations / moved, rel=2e-3)


def test_prefill_is_the_closed_form() -> None:
    n = LLAMA.parameters - 2 * 32000 * 4096
    last = 4096 * 4096 + 3 * 4096 * 11008  # after the last attention one row is computed
    [point] = found(LLAMA, prompts=(2048,)).prefill
    attention = 4 * 32 * 4096 * 2048 * 2049 // 2
    operations = 2048 * 2 * (n - last) + 2 * (last + 32000 * 4096) + attention
    assert point.phase.ops == pytest.approx(operations, rel=1e-3)
    assert point.phase.bound == "operations"
    assert point.seconds == pytest.approx(operations / 2e14, rel=5e-3)
    assert point.mfu == pytest.approx(1, abs=5e-3)


def test_heads_that_share_keys_raise_attentions_intensity_only() -> None:
    """Attention: 4 operations for 4 bytes of a key and value on each head that reads them; the
    batch does not matter, the layers' matrices rise with it.
    """
    for subject, expected in ((LLAMA, 1), (GROUPED, 4)):
        for point in found(subject, contexts=(4000,), sequences=(1, 8, 64)).decode:
            parts = {part.name: part for part in point.phase.parts}
            assert parts["attention"].intensity == pytest.approx(expected, rel=1e-3)
            assert parts["layers"].intensity == pytest.approx(point.sequences, rel=1e-3)
            assert parts["layers"].bound == "bytes"


def test_the_ridge_is_where_the_bound_changes() -> None:
    """200 operations a byte: matrices of bf16 are computed as fast as read from batch 200 on."""
    result = found(GROUPED, contexts=(1,), sequences=(199, 201), device=CHIP)
    assert [roof.ridge for roof in result.roofs] == [200.0]
    below, above = ({p.name: p.bound for p in point.phase.parts} for point in result.decode)
    assert (below["layers"], above["layers"]) == ("bytes", "operations")
    [context] = result.contexts
    assert context.crossing is not None
    first, second = found(
        GROUPED, contexts=(1,), sequences=(context.crossing - 1, context.crossing)
    ).decode
    assert (first.phase.bound, second.phase.bound) == ("bytes", "operations")


def test_a_cache_that_takes_longer_to_read_than_its_token_to_compute() -> None:
    """A token: 2N operations, in 67 µs; 4 · 32 · 32 · 128 bytes of cache each, in 0.52 µs: from 128
    tokens of context on no batch is bound by operations.
    """
    result = found(LLAMA, contexts=(100, 200))
    assert [context.crossing is None for context in result.contexts] == [False, True]
    near, far = (context.limit for context in result.contexts)
    assert near > 200 > far
    [point] = found(LLAMA, contexts=(200,), sequences=(10_000,)).decode
    assert point.phase.intensity == pytest.approx(far, rel=0.02)
    assert point.fits is False


def test_a_prompt_in_chunks_reads_the_weights_for_each() -> None:
    [whole] = found(LLAMA, prompts=(1000,)).prefill
    [chunked] = found(LLAMA, prompts=(1000,), chunk=100).prefill
    read = [sum(part.weight_bytes for part in each.phase.parts) for each in (whole, chunked)]
    assert read[1] > 9 * read[0]
    assert chunked.phase.tokens == 1000
    assert chunked.seconds > whole.seconds
    slow = Device("slow to start", lambda _: Rates(1e12, 2e14, step_overhead=0.5))
    [late] = found(LLAMA, prompts=(1000,), chunk=100, device=slow).prefill
    assert late.seconds == pytest.approx(chunked.seconds + 10 * 0.5)
    assert late.fits is None


@given(
    sequences=st.integers(1, 2000),
    context=st.integers(1, 8000),
    more=st.integers(1, 500),
    bandwidth=st.floats(1e9, 1e13),
    peak=st.floats(1e11, 1e16),
)
@settings(max_examples=40)
def test_what_holds_everywhere(
    sequences: int, context: int, more: int, bandwidth: float, peak: float
) -> None:
    device = Device("any", lambda _: Rates(bandwidth, peak))
    contexts = (context, context + more)
    result = found(GROUPED, contexts=contexts, sequences=(sequences, sequences + more),
                   device=device)  # fmt: skip
    few, many, _, longer = result.decode
    for point in result.decode + result.prefill:
        # Never above the roof, nor below what either bound alone would leave of it.
        roof = min(peak, point.phase.intensity * bandwidth)
        assert point.ops_per_second <= roof * (1 + 1e-9)
        assert point.ops_per_second >= roof / 2 * (1 - 1e-9)
        assert 0 < point.mfu <= 1 + 1e-9
    # A step of more sequences takes no less time, and gives no fewer tokens a second.
    assert many.seconds >= few.seconds
    assert many.tokens_per_second >= few.tokens_per_second * (1 - 1e-9)
    assert longer.seconds > many.seconds or longer.phase.bound == "operations"
    assert longer.bytes_held >= many.bytes_held > few.bytes_held
    assert few.phase.intensity <= result.contexts[0].limit * (1 + 1e-6) or sequences == 1


def test_predictions_take_a_share_of_the_roof() -> None:
    """Half the peak and a quarter of the bandwidth: one sequence, bound by bytes, takes four times
    as long, a long prompt, bound by operations, twice. What bounds is of the roof.
    """
    half = CHIP.assuming(0.5, 0.25)
    at_best, expected = (found(LLAMA, prompts=(2000,), device=each) for each in (CHIP, half))
    assert expected.decode[0].seconds == pytest.approx(4 * at_best.decode[0].seconds, rel=1e-3)
    assert expected.prefill[0].seconds == pytest.approx(2 * at_best.prefill[0].seconds, rel=1e-2)
    for one, other in zip(at_best.decode + at_best.prefill, expected.decode + expected.prefill,
                          strict=True):  # fmt: skip
        assert one.phase == other.phase
        assert one.seconds == one.seconds_at_roof == other.seconds_at_roof
    assert at_best.contexts == expected.contexts


def test_cost() -> None:
    """3600 units an hour are one a second; at 1000 tokens a second a million takes 1000."""
    assert per_million(3600, 1000) == pytest.approx(1000)


# --- the command ---------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", "roofline", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command(tmp_path: Path) -> None:
    picture = tmp_path / "roof.svg"
    shape = ("--context", "512,2K", "--prompt-len", "256", "--batch-sizes", "1,64", "--price", "3")
    arguments = ("llama-3-8b", "--device", "h100", *shape)
    facts: dict[str, Any] = strict_json.loads(run(*arguments, "--json", "--plot", str(picture)))
    assert facts["measured"] is False
    assert facts["weight_bytes"] == 16_061_054_976
    assert [(point["context"], point["sequences"]) for point in facts["decode"]] == [
        (512, 1), (512, 64), (2048, 1), (2048, 64),
    ]  # fmt: skip
    for point in facts["decode"]:
        rate = point["sequences"] / point["tpot_seconds"]
        assert point["tokens_per_second"] == pytest.approx(rate)
        assert point["cost_per_million_tokens"] == pytest.approx(3 / 3600 / rate * 1e6)
        assert point["tokens_per_unit_of_cost"] == pytest.approx(3600 * rate / 3)
        assert point["operations_per_byte"] == point["operations"] / point["bytes"]
    text = run(*arguments)
    assert "not measured" in text
    assert "a million" in text
    assert max(map(len, text.splitlines())) <= 100
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    run(*arguments, "--plot", str(picture))
    assert picture.read_text() == drawn  # the same file for the same figures


def test_one_sequence_is_one() -> None:
    text = run("llama-3-8b", "--device", "memory=3350,bf16=1", "--context", "9")
    assert "  context 9: bound by operations from 1 sequence on; " in text


def test_the_models_own_context_is_accepted() -> None:
    """The last token of a full context has one fewer before it in the cache."""
    points = {}
    for context in ("4096", "4095"):
        arguments = ("llama-2-7b", "--device", "h100", "--context", context, "--batch-sizes", "1")
        (points[context],) = strict_json.loads(run(*arguments, "--json"))["decode"]
    assert points["4096"]["context"] == 4096
    assert points["4096"]["tpot_seconds"] == points["4095"]["tpot_seconds"]
    assert points["4096"]["bytes_held"] == points["4095"]["bytes_held"]


def test_small_models_on_gpus_are_bound_by_their_launches() -> None:
    """Published: 262 tokens/s of Qwen2.5 0.5B in AWQ and 312 in BF16 on an A100 (vLLM 0.6.3), and
    4,006 of a model of two layers on an RTX 4090 (llama.cpp).
    """
    for model, format, gpu, published in (
        ("qwen2.5-0.5b", "awq", "a100", 262),
        ("qwen2.5-0.5b", "bf16", "a100", 312),
        ("qwen3-0.6b", "bf16", "h20", 414),
        ("smollm2-135m", "bf16", "h100", 400),  # like models of as many layers
    ):
        arguments = (model, "--device", gpu, "--format", format, "--batch-sizes", "1", "--json")
        (point, *_) = strict_json.loads(run(*arguments, "--context", "1000"))["decode"]
        assert 0.6 * published < point["tokens_per_second"] < 1.6 * published


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("device", ["b200", "t4", "memory=3350,fp16=989000"])
def test_no_step_is_quicker_than_its_launches(name: str, device: str) -> None:
    arguments = (name, "--device", device, "--context", "64", "--batch-sizes", "1", "--json")
    facts = strict_json.loads(run(*arguments, "--prompt-len", "64"))
    least = len(Subject.find(name).program.ops) * FITTED.launch_seconds + FITTED.step_seconds
    for point in (*facts["decode"], *facts["prefill"]):
        assert point.get("tpot_seconds", point.get("ttft_seconds")) > least
        assert point["seconds_at_roof"] < point.get("tpot_seconds", point.get("ttft_seconds"))


def test_quantized_weights_have_a_roof_of_their_own() -> None:
    arguments = ("llama-3-8b", "--device", "h100", "--format", "q4_k", "--json")
    roofs = strict_json.loads(run(*arguments))["roofs"]
    assert [roof["arithmetic"] for roof in roofs] == ["bf16"], "widened to 16 bits on GPUs"
    narrow = strict_json.loads(run(*arguments, "--arithmetic", "int8"))
    assert [roof["arithmetic"] for roof in narrow["roofs"]] == [Arithmetic.INT8, Arithmetic.BF16]
    figures = ("--device", "memory=48,int8=940,bf16=470")
    cpu = strict_json.loads(run("llama-3-8b", "--format", "q4_k", "--json", *figures))
    assert [roof["arithmetic"] for roof in cpu["roofs"]] == [Arithmetic.INT8, Arithmetic.BF16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "0"), "1 to 16384"),
        (("--batch-sizes", "1,x"), "not a list of batch sizes"),
        (("--batch-sizes", "1,99999999999"), "1 to 16384"),
        (("--context", "12,-3"), "-3"),
        (("--context", "0"), "at least one token"),
        (("--price", "0"), "--price"),
        (("--compute-share", "1.5"), "--compute-share"),
        (("--arithmetic", "fp4"), "fp4"),
        (("--max-num-batched-tokens", "0"), "max-num-batched-tokens"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], message: str) -> None:
    given = ["plan", "roofline", "llama-3-8b", "--device", "h100", *arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "9000"), "--context 9000 is more"),
        (("--prompt-len", "8193"), "--prompt-len 8193 is more"),
        (("--plot", "roof.txt"), "a plot is a file of"),
        (("--plot", "/nowhere/at/all/roof.svg"), "there is no folder"),
    ],
)
def test_what_the_model_or_the_disk_refuses(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        run("llama-3-8b", "--device", "h100", *arguments)


def test_the_peaks_of_a_device() -> None:
    """All its units are listed, also those that this model does not use."""
    facts = strict_json.loads(run("llama-3-8b", "--device", "h100", "--json"))
    assert facts["peaks"] == {
        "fp32": 67e12, "fp16": 989e12, "bf16": 989e12, "int8": 1979e12, "fp8": 1979e12,
    }  # fmt: skip
    text = run("llama-3-8b", "--device", "h100")
    assert "peaks       fp32 67, fp16 989, bf16 989, int8 1,979, fp8 1,979 Top/s" in text
    assert "fp8" not in run("llama-3-8b", "--device", "a100")


@pytest.mark.parametrize("command", [("plan", "roofline"), ("simulate", "--num-prompts", "1")])
def test_the_embeddings_format_of_a_stored_model(command: tuple[str, ...]) -> None:
    """Which the file says; with --format it is a matter of choice."""
    on = (str(TINY), "--device", "h100", "--embedding-format", "f32")
    done = CliRunner().invoke(app, [*command, *on])
    assert "--embedding-format F32 needs --format" in str(done.exception)
    done = CliRunner().invoke(app, ["plan", "roofline", *on, "--format", "bf16"])
    assert done.exit_code == 0, done.output
