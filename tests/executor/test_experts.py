"""Sparse experts in the native executor: against float64, against dense layers, and their reach."""

import dataclasses

import numpy as np
import pytest

from executor import reference, tiny
from executor.driving import Driver
from octavo.executor.native import lower
from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.models import families
from octavo.models.config import Experts, Layer, ModelConfig, Rope
from paths import TESTS

ISAS = ["generic", "avx2", "avx512", "avx512_bf16"]
BLOCKS = np.load(TESTS / "kernels/gguf_blocks.npz")

STORED = [format for format in WeightFormat if format.in_gguf]
STORED += [WeightFormat.E4M3, WeightFormat.NVFP4]

SHAPES = {
    "mixtral": tiny.config("mixtral"),
    "one of many": tiny.config("mixtral", Experts(40, 1, 64, True)),
    "all of them": tiny.config("qwen3moe", Experts(4, 4, 48, True)),
    "one of one": tiny.config("mixtral", Experts(1, 1, 64, False)),
    "not renormalized": tiny.config("qwen3moe", Experts(16, 5, 32, False)),
    "odd widths": tiny.config("qwen3moe", Experts(7, 3, 33, True), hidden_size=50),
    "sigmoids": tiny.config("qwen3moe", Experts(16, 5, 32, False, gating="sigmoid", scale=0.25)),
    "sigmoids, biased choice": tiny.config(
        "qwen3moe",
        Experts(16, 5, 32, True, "sigmoid", normalize_eps=1e-2, scale=2.5, selection_bias=True),
    ),
    "biased choice": tiny.config("mixtral", Experts(9, 3, 32, True, selection_bias=True)),
    "biases": tiny.config("mixtral", Experts(40, 3, 90, True, biases=True)),
    "shared": tiny.shared(Experts(8, 3, 32, True)),
    "shared, ungated": tiny.shared(Experts(8, 3, 32, True, biases=True), family="shared ungated"),
}


@pytest.fixture(autouse=True)
def shared_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in tiny.SHARED.items():
        monkeypatch.setitem(families.FAMILIES, name, family)


def driver(checkpoint: Checkpoint, isa: str | None = None, threads: int = 1) -> Driver:
    try:
        return Driver(checkpoint, isa=isa, threads=threads, kv_dtype="fp16")
    except ValueError as error:
        if "instruction set" not in str(error):
            raise
        pytest.skip(str(error))


def tokens_of(config: ModelConfig, count: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, config.vocab_size, count)]


def expected(checkpoint: Checkpoint, tokens: list[int]) -> np.ndarray:
    weights = {role: tiny.dequantize(weight) for role, weight in checkpoint.weights.items()}
    return reference.run(families.program(checkpoint.config), weights, tokens)


def error(logits: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(logits - wanted).max() / wanted.std())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape: str, isa: str) -> None:
    """Hundreds of rows, a few, and one, which share out their work in different ways."""
    checkpoint = tiny.checkpoint(SHAPES[shape])
    tokens = tokens_of(checkpoint.config, 210)
    tested = driver(checkpoint, isa, threads=2)
    got = tested.run(tokens)
    assert error(got, expected(checkpoint, tokens)) < 4e-3
    assert np.array_equal(tested.run(tokens, [100, 33, 7, 1]), got)
    assert np.array_equal(driver(checkpoint, isa).run(tokens, [5]), got)


@pytest.mark.parametrize(
    ("format", "bound"),
    [
        (WeightFormat.F16, 1e-3),
        (WeightFormat.BF16, 2e-2),
        (WeightFormat.Q8_0, 5e-2),
        (WeightFormat.Q4_0, 5e-2),
    ],
)
def test_stored_formats(format: WeightFormat, bound: float) -> None:
    """The typical row: one whose experts are a close call goes to others after any rounding."""
    checkpoint = tiny.checkpoint(tiny.config("qwen3moe"), format)
    tokens = tokens_of(checkpoint.config, 90)
    wanted = expected(checkpoint, tokens)
    differences = driver(checkpoint).run(tokens, [60, 1]) - wanted
    spreads = np.sqrt((differences**2).mean(axis=1)) / wanted.std()
    assert float(np.median(spreads)) < bound


def blocks(format: WeightFormat, shape: tuple[int, ...], rng: np.random.Generator) -> Weight:
    """A matrix of recorded blocks; of a folder's floats of few bits, of rounded ones."""
    if not format.in_gguf:
        values = rng.normal(0.0, 0.1, shape).astype(np.float32)
        group = tiny.FP8_GROUP if format is WeightFormat.E4M3 else 0
        return Weight("matrix", format, shape, tiny.quantize(values, format), group)
    data = BLOCKS[f"{format.name}_bytes"][1:]  # the first row has numbers of every size
    row_bytes = data.shape[1] * shape[1] // 512
    picked = data[rng.integers(0, len(data), shape[0]), :row_bytes].copy()
    return Weight("matrix", format, shape, picked.reshape(-1))


def assert_dense(own: dict[str, Weight], isa: str | None) -> None:
    """Experts of which a token takes one, with a weight of exactly one: a dense layer's bits."""
    experts = Experts(4, 1, 256, True)
    rope = Rope(10000.0, 16, False)
    dense = tiny.config("qwen3", hidden_size=256, intermediate_size=256, layers=(Layer(rope),))
    sparse = dataclasses.replace(dense, family="qwen3moe", layers=(Layer(rope, experts=experts),))
    base = tiny.checkpoint(sparse)
    tokens = tokens_of(sparse, 40)
    got = driver(dataclasses.replace(base, weights=base.weights | own), isa, threads=2).run(tokens)
    matches: list[set[int]] = [set() for _ in tokens]
    for index in range(experts.count):
        weights = {
            role.partition("_exps")[0]: w for role, w in own.items() if role[-1] == str(index)
        }
        whole = dataclasses.replace(base, config=dense, weights=base.weights | weights)
        logits = driver(whole, isa).run(tokens)
        assert np.isfinite(logits).all()
        for match, one, other in zip(matches, got, logits, strict=True):
            match |= {index} if one.tobytes() == other.tobytes() else set()
    # Where a gate lets nothing through, all experts are alike.
    assert all(matches)
    assert len(set.union(*(match for match in matches if len(match) == 1))) > 1


ROLES = [
    f"layers.0.ffn_{kind}_exps.{index}" for kind in ("gate", "up", "down") for index in range(4)
]


@pytest.mark.parametrize("format", STORED, ids=lambda f: f.name)
@pytest.mark.parametrize("isa", ["generic", "avx2", None])
def test_experts_are_dense_layers_in_every_format(isa: str | None, format: WeightFormat) -> None:
    rng = np.random.default_rng(int(format))
    assert_dense({role: blocks(format, (256, 256), rng) for role in ROLES}, isa)


@pytest.mark.parametrize("format", [WeightFormat.I3, WeightFormat.I4, WeightFormat.I8])
@pytest.mark.parametrize("orders", ["none", "one", "each", "some"])
def test_experts_may_have_orders_of_their_own(orders: str, format: WeightFormat) -> None:
    """As GPTQ gives them: gate and up of an expert the same one."""
    rng = np.random.default_rng(5)
    own: dict[str, Weight] = {}
    for role in ROLES:
        values = rng.normal(0.0, 0.1, (256, 256)).astype(np.float32)
        data = tiny.quantize_grouped(values, format, 64)
        own[role] = Weight(role, format, (256, 256), data, group=64)
        index = int(role[-1])
        if orders == "none" or (orders == "some" and index % 2):
            continue
        seed = (index if orders != "one" else 0) + 100 * ("down" in role)
        order = np.random.default_rng(seed).permutation(256).astype(np.int32)
        own[role] = own[role]._replace(order=order)
    assert_dense(own, None)


def single_layer(experts: Experts) -> Checkpoint:
    rope = Rope(10000.0, 16, True)
    return tiny.checkpoint(tiny.config("mixtral", layers=(Layer(rope, experts=experts),)))


def poisoned(checkpoint: Checkpoint, role: str) -> Checkpoint:
    weight = checkpoint.weights[role]
    bad = weight._replace(source=np.full_like(weight.data, 0xFF))  # NaN
    return dataclasses.replace(checkpoint, weights=checkpoint.weights | {role: bad})


@pytest.mark.parametrize("part", ["ffn_gate_exps", "ffn_down_exps"])
def test_only_the_chosen_experts_are_read(part: str) -> None:
    """Each row fails with exactly as many experts as it chooses, and all else is as it was."""
    experts = Experts(9, 3, 64, True)
    checkpoint = single_layer(experts)
    tokens = tokens_of(checkpoint.config, 30)
    whole = driver(checkpoint).run(tokens)
    failed = np.zeros(len(tokens), int)
    for index in range(experts.count):
        spoilt = driver(poisoned(checkpoint, f"layers.0.{part}.{index}"), threads=2).run(tokens)
        bad = np.isnan(spoilt).any(axis=1)
        assert np.array_equal(spoilt[~bad], whole[~bad])
        failed += bad
    assert (failed == experts.chosen).all()


def test_equal_logits_go_to_the_first_experts() -> None:
    checkpoint = single_layer(Experts(8, 3, 64, True))
    router = checkpoint.weights["layers.0.ffn_gate_inp"]
    rows = router.data.view(np.float32).reshape(8, -1).copy()
    tokens = tokens_of(checkpoint.config, 20)
    for same in (rows * 0, np.tile(rows[:2], (4, 1))):  # all alike, and two kinds in turn
        weight = router._replace(source=same.view(np.uint8).reshape(-1))
        changed = dataclasses.replace(
            checkpoint, weights=checkpoint.weights | {"layers.0.ffn_gate_inp": weight}
        )
        assert error(driver(changed).run(tokens), expected(changed, tokens)) < 4e-3
    spoilt = poisoned(changed, "layers.0.ffn_down_exps.7")
    assert np.isfinite(driver(spoilt).run(tokens)).all()


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.Q8_0])
def test_nan_fails_its_own_sequence_only(format: WeightFormat) -> None:
    """A row whose router says NaN goes somewhere, and what it makes stays with it."""
    checkpoint = tiny.checkpoint(tiny.config("mixtral", tied_embeddings=False), format)
    embedding = checkpoint.weights["token_embd"]
    data = embedding.data.copy()
    row_bytes = len(data) // embedding.shape[0]
    data[5 * row_bytes : 6 * row_bytes] = 0xFF
    checkpoint = dataclasses.replace(
        checkpoint, weights=checkpoint.weights | {"token_embd": embedding._replace(source=data)}
    )
    good = [t for t in tokens_of(checkpoint.config, 60) if t != 5]
    alone = driver(checkpoint).run(good)
    assert np.isfinite(alone).all()
    tested = driver(checkpoint, threads=2)
    bad, other = tested.start([1, 5] * 30), tested.start(good)
    tested.step([(bad, 60), (other, other.left)])
    assert np.array_equal(np.array(other.logits), alone)
    assert np.isnan(np.array(bad.logits[1:])).all()


def test_rows_that_want_no_logits_go_to_no_expert_of_the_last_layer() -> None:
    checkpoint = tiny.checkpoint(tiny.config("mixtral"))
    tested = driver(checkpoint, threads=2)
    tokens = tokens_of(checkpoint.config, 120)
    everything = tested.run(tokens)
    batch = tested.batch([(tested.start(tokens), 120)])
    for rows in ([3, 17, 119], [50], []):
        batch.logits_rows = np.array(rows, np.int32)
        logits = tested.executor.execute(batch).logits
        assert logits is not None
        assert np.array_equal(logits, everything[rows])


def test_experts_of_mixed_formats_are_refused() -> None:
    checkpoint = tiny.checkpoint(tiny.config("mixtral"))
    other = tiny.checkpoint(tiny.config("mixtral"), WeightFormat.Q8_0)
    role = "layers.1.ffn_up_exps.3"
    mixed = dataclasses.replace(
        checkpoint, weights=checkpoint.weights | {role: other.weights[role]}
    )
    with pytest.raises(CheckpointError, match=rf"mixed formats: .* is F32, {role} is Q8_0"):
        driver(mixed)
    # One kind of experts' matrices may differ from the next.
    ups = {r: w for r, w in other.weights.items() if "ffn_up_exps" in r}
    split = dataclasses.replace(checkpoint, weights=checkpoint.weights | ups)
    tokens = tokens_of(split.config, 50)
    assert error(driver(split).run(tokens), expected(split, tokens)) < 5.0
    assert np.array_equal(driver(split).run(tokens), driver(split, threads=2).run(tokens, [7]))


class Formats:
    def activation_bytes(self, format: int, k: int) -> int:
        return k * 4

    def same_activations(self, a: int, b: int) -> bool:
        return a == b

    def slots_row_bytes(self, experts: int, chosen: int, slot_bytes: int) -> int:
        return chosen * slot_bytes


def test_a_sparse_layer_meets_six_times() -> None:
    program = families.program(tiny.config("mixtral"))
    formats = dict.fromkeys(program.weights, WeightFormat.Q4_0)
    formats |= {role: WeightFormat.F32 for role in formats if role.endswith("ffn_gate_inp")}
    regions = lower.lower(program, formats, Formats()).regions
    assert [region.name for region in regions[5:14]] == [
        "attn_output",
        "norm prepare",
        "ffn_gate_inp",
        "route",
        "sort",
        "prepare spread",
        "ffn_gate_exps+ffn_up_exps",
        "gate prepare",
        "ffn_down_exps",
    ]
    assert regions[14].name.startswith("combine add norm prepare")
    # Every op of the program is some region's, once.
    ops = [op for region in regions for op in region.ops]
    assert ops == list(range(len(program.ops)))
