"""The families' Programs: every value defined before it is read, every shape consistent."""

from dataclasses import replace

import pytest

from executor import tiny
from octavo.models.config import Activation, Experts, Layer, ModelConfig, Rope
from octavo.models.families import FAMILIES, program
from octavo.models.program import (
    Add,
    Combine,
    Embed,
    ExpertLinear,
    GatedActivation,
    Linear,
    Logits,
    PagedAttention,
    Program,
    RmsNorm,
    RopeAndStoreKv,
    RotateQueries,
    Route,
    RowOp,
)

LLAMA = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    context_length=256,
    norm_eps=1e-5,
    activation=Activation.SILU,
    attention_scale=0.25,
    tied_embeddings=True,
    layers=(Layer(Rope(1e4, 16, interleaved=True)),) * 3,
)
GEMMA3 = replace(
    LLAMA,
    family="gemma3",
    activation=Activation.GELU_TANH,
    embedding_scale=48**0.5,
    logits_softcap=30.0,
    attention_softcap=50.0,
    layers=(Layer(Rope(1e4, 16, interleaved=False), 8), Layer(Rope(1e6, 16, interleaved=False))),
)
WINDOWS = (Layer(Rope(1e4, 16, interleaved=False), 8), Layer(Rope(1e4, 16, interleaved=False)))
SPARSE = tuple(
    replace(LLAMA.layers[0], experts=experts)
    for experts in (Experts(8, 2, 40, True), None, Experts(8, 2, 40, True))
)
# Every family, as a Llama where nothing else is said.
CONFIGS = {name: replace(LLAMA, family=name) for name in FAMILIES} | {
    "qwen2": replace(LLAMA, family="qwen2", biases=frozenset({"attn_q", "attn_k", "attn_v"})),
    "gemma2": replace(GEMMA3, family="gemma2", layers=WINDOWS),
    "phi3": replace(LLAMA, family="phi3", layers=WINDOWS),
    "granite": replace(
        LLAMA, family="granite", embedding_scale=12.0, residual_scale=0.25, logits_scale=0.125
    ),
    "mixtral": replace(LLAMA, family="mixtral", layers=SPARSE[:1] * 3),
    "qwen3moe": replace(LLAMA, family="qwen3moe", layers=SPARSE),
    "llama untied": replace(LLAMA, tied_embeddings=False),
    "llama with biases": replace(LLAMA, biases=frozenset({"attn_q", "attn_k", "ffn_down"})),
    "gemma3": GEMMA3,
    **{f"{name}, heads of two widths": tiny.mixed(name) for name in ("llama", "gemma3", "olmo2")},
    "gemma3 untied": replace(GEMMA3, tied_embeddings=False),
}


def check(compute: Program) -> None:
    """Walk the ops as an executor would, on widths alone."""
    config, widths = compute.config, compute.widths
    written: set[str] = set()
    used: dict[str, tuple[int, ...]] = {}
    rotated: list[int] = []  # layers, each once
    route: Route | None = None
    for op in compute.ops:
        assert set(op.reads) <= written, op
        written |= set(op.writes)
        used |= op.weight_shapes(widths, config)
        match op:
            case Embed():
                assert op.scale == config.embedding_scale / config.residual_scale
            case RmsNorm():
                assert widths[op.out] == widths[op.x]
                assert widths[op.x] % (op.group or 1) == 0
                assert op.eps == config.norm_eps / config.residual_scale**2
                assert op.scale == (config.logits_scale if op.weight == "output_norm" else 1.0)
            case Linear():
                assert op.x != op.out
            case RopeAndStoreKv():
                rotated.append(op.layer)
                assert (op.kv_heads, op.head_dim) == config.heads_of(config.layers[op.layer])
                kv_size = op.kv_heads * op.head_dim
                assert (widths[op.k], widths[op.v]) == (kv_size, kv_size)
                assert widths[op.q] == config.num_heads * op.head_dim
                assert op.rope == config.layers[op.layer].rope
            case RotateQueries():
                rotated.append(len(rotated))
                assert widths[op.q] == config.num_heads * op.head_dim
                assert op.rope == config.layers[rotated[-1]].rope
            case PagedAttention():
                layer = config.layers[rotated[-1]]
                assert op.layer == (rotated[-1] if layer.shares is None else layer.shares)
                assert (op.kv_heads, op.head_dim) == config.heads_of(layer)
                q_size = config.num_heads * op.head_dim
                assert (widths[op.q], widths[op.out]) == (q_size, q_size)
                assert op.window == layer.window
                assert (op.scale, op.softcap) == (config.attention_scale, config.attention_softcap)
            case GatedActivation():
                assert widths[op.gate] == widths[op.up] == widths[op.out]
                gates = op.gate == "q_gate"  # of attention
                assert op.activation is (Activation.SIGMOID if gates else config.activation)
            case Route():
                sizes = op.experts.count, 2 * op.experts.chosen
                assert (widths[op.logits], widths[op.out]) == sizes
                route = op
            case ExpertLinear():
                assert (op.route, op.experts) == (route.out, route.experts)
                down = op.weight.endswith("down_exps")
                inner, hidden = op.experts.intermediate_size, config.hidden_size
                assert widths[op.x] == (inner * op.experts.chosen if down else hidden)
                assert widths[op.out] == (hidden if down else inner) * op.experts.chosen
                assert used[op.weights[-1]] == ((hidden, inner) if down else (inner, hidden))
            case Combine():
                assert (op.route, op.experts) == (route.out, route.experts)
                assert widths[op.x] == widths[op.out] * op.experts.chosen
            case Add():
                assert widths[op.x] == widths[op.y] == widths[op.out]
            case Logits():
                assert op is compute.ops[-1]
                assert op.softcap == config.logits_softcap
                assert op.weight == ("token_embd" if config.tied_embeddings else "output")
            case RowOp():
                assert {widths[value] for value in op.reads} == {widths[op.writes[0]]}
            case _:
                pytest.fail(f"{op} in a family")
    assert rotated == list(range(len(config.layers)))
    assert used == compute.weights


@pytest.mark.parametrize("name", CONFIGS)
def test_program_is_consistent(name: str) -> None:
    check(program(CONFIGS[name]))


def test_llama_layer_reads_as_the_paper_says() -> None:
    ops = program(LLAMA).ops
    kinds = [type(op).__name__ for op in ops]
    layer = [
        *("RmsNorm", "Linear", "Linear", "Linear", "RopeAndStoreKv", "PagedAttention", "Linear"),
        *("Add", "RmsNorm", "Linear", "Linear", "GatedActivation", "Linear", "Add"),
    ]
    assert kinds == ["Embed", *layer * 3, "RmsNorm", "Logits"]


def test_gemma3_norms_sit_on_both_sides() -> None:
    roles = [op.weight for op in program(GEMMA3).ops if isinstance(op, RmsNorm)]
    names = [role.removeprefix("layers.0.") for role in roles[:6]]
    assert names == [
        "attn_norm",
        "attn_q_norm",
        "attn_k_norm",
        "post_attention_norm",
        "ffn_norm",
        "post_ffw_norm",
    ]
    groups = [op.group for op in program(GEMMA3).ops if isinstance(op, RmsNorm)]
    assert groups[:6] == [0, 16, 16, 0, 0, 0]


def test_biases_are_those_of_the_config() -> None:
    biases = {
        op.bias
        for op in program(CONFIGS["llama with biases"]).ops
        if isinstance(op, Linear) and op.bias
    }
    assert biases == {
        f"layers.{i}.{name}.bias" for i in range(3) for name in ("attn_q", "attn_k", "ffn_down")
    }


def test_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'mamba' is not supported; supported are "):
        program(replace(LLAMA, family="mamba"))


def sparse(experts: Experts) -> tuple[Layer, ...]:
    return (replace(LLAMA.layers[0], experts=experts),)


def sharing(*shares: int | None, **last: object) -> dict[str, object]:
    """Layers that share others' caches, the last changed."""
    layers = [replace(LLAMA.layers[0], shares=of) for of in shares]
    return {"layers": (*layers[:-1], replace(layers[-1], **last))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_kv_heads": 4}, "not a multiple"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
        ({"attention_scale": 0.0}, "attention_scale is 0"),
        ({"embedding_scale": float("inf")}, "embedding_scale is inf"),
        ({"logits_softcap": -1.0}, "logits_softcap is -1"),
        ({"layers": (replace(LLAMA.layers[0], num_kv_heads=4),)}, "4 does not divide num_heads"),
        ({"layers": (replace(LLAMA.layers[0], num_kv_heads=0),)}, "num_kv_heads 0"),
        ({"layers": (replace(LLAMA.layers[0], head_dim=1026),)}, "head_dim is 1026"),
        ({"layers": (replace(LLAMA.layers[0], head_dim=17),)}, "head_dim is 17, which is odd"),
        ({"layers": (replace(LLAMA.layers[0], head_dim=8),)}, "rope dim 16 does not fit"),
        (sharing(0), "layer 0: it shares the cache of layer 0, which is not an earlier one"),
        (sharing(None, 2, None), "layer 1: it shares the cache of layer 2, which is not"),
        (sharing(None, -1), "layer 1: it shares the cache of layer -1, which is not"),
        (sharing(None, 0, 1), "layer 2: it shares the cache of layer 1, which has none"),
        (sharing(None, 0, window=20), "layer 1: .* layer 0, whose window or heads differ"),
        (sharing(None, 0, head_dim=18), "layer 1: .* layer 0, whose window or heads differ"),
        (sharing(None, 0, rope=Rope(2e4, 16, True)), "layer 1: .* whose rotary positions differ"),
        ({"layers": ()}, "number of layers is 0"),
        ({"layers": LLAMA.layers * 171}, "number of layers is 513"),
        ({"layers": (Layer(Rope(1e4, 18, interleaved=True)),)}, "rope dim 18"),
        ({"layers": (Layer(Rope(0.0, 16, interleaved=True)),)}, "rope theta 0"),
        ({"layers": (Layer(Rope(1e4, 16, True, factors=(1.0,))),)}, "1 rope factors for 8 pairs"),
        ({"layers": (Layer(Rope(1e4, 16, interleaved=True), window=0),)}, "window is 0"),
        (
            {"layers": SPARSE[:1] + sparse(Experts(8, 3, 40, True))},
            "layers differ in their experts",
        ),
        ({"layers": sparse(Experts(4, 5, 8, True))}, "a token goes to 5 of 4 experts"),
        ({"layers": sparse(Experts(4, 0, 8, True))}, "a token goes to 0 of 4 experts"),
        ({"layers": sparse(Experts(1025, 2, 8, True))}, "layer 0: 1025 experts, outside 1"),
        ({"layers": sparse(Experts(4, 2, 0, True))}, "experts' intermediate_size is 0"),
        ({"layers": sparse(Experts(4, 2, 8, True, "tanh"))}, "gating is 'tanh', neither"),
        ({"layers": sparse(Experts(4, 2, 8, True, normalize_eps=0.1))}, "0.1, .* for softmax"),
        ({"layers": sparse(Experts(4, 2, 8, True, "sigmoid", 2.0))}, "2.0, .* for sigmoid"),
        ({"layers": sparse(Experts(4, 2, 8, True, scale=0.0))}, "experts' scale is 0"),
        ({"layers": (replace(SPARSE[0], shared_expert=-1),)}, "layer 0: shared_expert is -1"),
        (
            {"layers": tuple(replace(SPARSE[0], shared_expert=width) for width in (8, 0, 9))},
            "layers differ in the width of their shared experts",
        ),
    ],
)
def test_config_is_validated(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(LLAMA, **change)  # type: ignore[arg-type]
