"""Latent attention is planned for: what it takes, and what of a config.json is refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import strict_json
from loader.gguf_writer import STRING, Gguf
from octavo.cli import app
from octavo.engine.config import SettingsError
from octavo.executor.cost import CostModel
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.loader.hf_config import model_config
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.models.refused import LATENT
from octavo.tools.plan.latent import DEFAULTS, LatentAttention
from octavo.tools.plan.memory_plan import KvCacheSize, active_parameters
from octavo.tools.plan.phase import decode_batch
from octavo.tools.plan.subject import Subject

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
TYPES = ["sparse", "dense", "dense", "sparse"]


def config(folder: Path, model_type: str = "deepseek_v3", **changes: Any) -> Path:
    path = folder / CONFIG
    path.write_text(json.dumps(TINY | {"model_type": model_type} | changes))
    return path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def planned(*arguments: str) -> dict[str, Any]:
    facts: dict[str, Any] = strict_json.loads(run("plan", "memory", *arguments, "--json"))
    return facts


@pytest.mark.parametrize(
    ("model_type", "changes", "parameters"),  # counted by transformers 5.24
    [
        ("deepseek_v2", {}, 269_600),
        ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}, 279_136),
        ("deepseek_v3", {"tie_word_embeddings": True}, 245_048),
        ("deepseek_v3", {"attention_bias": True, "first_k_dense_replace": 9}, 139_552),
        ("mistral4", {"first_k_dense_replace": 0}, 288_544),
        ("glm4_moe_lite", {}, 251_192),
        ("glm4_moe_lite", {"mlp_layer_types": TYPES}, 213_808),
    ],
)
def test_parameters_are_those_of_transformers(
    model_type: str, changes: dict[str, Any], parameters: int, tmp_path: Path
) -> None:
    assert Subject.find(str(config(tmp_path, model_type, **changes))).parameters == parameters


def test_published_figures() -> None:
    """Of the models' cards; V2-Lite's 2.4 B are without the embedding. In the cache a token takes
    70.272 KB (DeepSeek-AI, 2025, "Insights into DeepSeek-V3", table 1).
    """
    active = {"deepseek-v3": 37.0, "deepseek-v2-lite": 2.6, "kimi-k2": 32.0, "mistral-small-4": 6.5}
    for name, billions in active.items():
        assert active_parameters(Subject.find(name)) == pytest.approx(billions * 1e9, rel=0.03)
    facts = planned("deepseek-v3", "--context", "1000")
    assert facts["kv_bytes_per_token"] == 70_272
    assert facts["kv_bytes"] == 70_272_000
    names = ("layers", "latent", "context", "users", "bytes_per_number")
    assert facts["factors"] == dict(zip(names, (61, 576, 1000, 1, 2), strict=True))


@pytest.mark.parametrize(
    ("dtype", "of_token"),
    [("bf16", 80), ("fp8", 40), ("int8", 40 + 2), ("int4", 20 + 4)],
)
def test_a_token_leaves_a_latent_and_a_key(dtype: str, of_token: int, tmp_path: Path) -> None:
    """One vector, with one scale and one least value, where heads have keys and values."""
    facts = planned(str(config(tmp_path)), "--context", "100", "--users", "3", "--kv-dtype", dtype)
    assert facts["kv_bytes_per_token"] == 4 * of_token
    assert facts["kv_bytes"] == 3 * 100 * 4 * of_token
    assert facts["kv_number_bytes"] + facts["kv_scale_bytes"] == facts["kv_bytes"]
    assert [each["name"] for each in facts["attention"]] == ["MLA"]
    model = Subject.find(str(config(tmp_path))).program.config
    layout = KvLayout.of(model, dtype=KvDtype(dtype))
    assert layout.bytes_per_token == facts["kv_bytes_per_token"]
    assert facts["kv_paged_bytes"] == 3 * 7 * layout.block_bytes
    assert KvCacheSize.of(model, 100, 3, KvDtype(dtype)).latent


def test_a_key_costs_its_width_and_then_that_of_the_latent(tmp_path: Path) -> None:
    """Of each head, in the absorbed form: 40 numbers of the key, then the 32 of its latent. The
    functions of the latent cost a multiply-add for each number of their matrix.
    """
    program = Subject.find(str(config(tmp_path))).program
    costs = CostModel(program, KvLayout.of(program.config))
    by_op = costs.by_op(decode_batch(1, 99))
    attention = [
        cost for op, cost in zip(program.ops, by_op, strict=True) if isinstance(op, LatentAttention)
    ]
    assert [cost.ops for cost in attention] == [2 * 4 * (40 + 32) * 100] * 4
    assert [cost.kv_bytes for cost in attention] == [101 * 80] * 4  # read, and its own written
    absorbed = [cost.ops for cost in by_op if cost.ops == 2 * 4 * (16 + 12) * 32]
    assert len(absorbed) == 4


def test_a_model_that_also_sees_has_its_text_part(tmp_path: Path) -> None:
    text = TINY | {"model_type": "kimi_k2"}
    file = {"model_type": "kimi_k25", "text_config": text}
    for outer, tied in (({}, False), ({"tie_word_embeddings": True}, True)):
        plain = Subject.find(str(config(tmp_path, tie_word_embeddings=tied))).parameters
        (tmp_path / CONFIG).write_text(json.dumps(file | outer))
        assert Subject.find(str(tmp_path / CONFIG)).parameters == plain


def test_every_plan_knows_it(tmp_path: Path) -> None:
    """On GPUs; here no kernel computes it, which is said."""
    path = str(config(tmp_path))
    for plan in ("quantization", "roofline", "batching"):
        assert run("plan", plan, path, "--device", "h100")
    assert "deepseek_v3" in run("plan", "memory", path)
    facts = planned(path)
    assert facts["verdict"].endswith("no kernel here takes latent attention.")
    assert facts["alternatives"] == []
    assert "Nothing narrower" not in run("plan", "memory", path)
    gpu = ("--device", "h100", "--num-prompts", "2")
    assert "tokens" in run("simulate", path, *gpu)
    for elsewhere in ((), ("--device", "memory=48,bf16=470,capacity=64")):
        done = CliRunner().invoke(app, ["simulate", path, "--num-prompts", "2", *elsewhere])
        assert isinstance(done.exception, SettingsError)
        assert "no kernel here computes latent attention" in str(done.exception)


@pytest.mark.parametrize("model_type", [*sorted(LATENT - {"deepseek2"})])
def test_the_engine_refuses_folders_by_name(model_type: str, tmp_path: Path) -> None:
    config(tmp_path, model_type)
    with pytest.raises(
        CheckpointError, match=rf"'{model_type}' is not supported: latent attention"
    ):
        model_config(HfFolder(tmp_path))


def test_the_engine_refuses_gguf_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    Gguf().set("general.architecture", STRING, "deepseek2").write(path)
    with pytest.raises(CheckpointError, match="'deepseek2' is not supported: latent attention"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"kv_lora_rank": 1 << 20}, "kv_lora_rank is 1048576, above"),
        ({"kv_lora_rank": 1020, "qk_rope_head_dim": 8}, "head_dim is 1028"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1"),
        ({"qk_nope_head_dim": "16"}, "qk_nope_head_dim is '16'"),
        ({"v_head_dim": None}, "v_head_dim is null"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000, above"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 4"),
        ({"mlp_layer_types": ["dense", "sparse", "moe", 7]}, "'moe' is neither"),
        ({"n_routed_experts": 5000}, "5000 experts"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"n_shared_experts": 1 << 30}, "shared_expert is 34359738368"),
        ({"n_shared_experts": 1.5}, "n_shared_experts is 1.5"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"rms_norm_eps": 0}, "norm_eps is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{what}"):
        Subject.find(str(config(tmp_path, **changes)))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 1 << 40), st.floats(), st.text(max_size=3),
    st.lists(st.sampled_from(["dense", "sparse", 3]), max_size=5), st.just({}),
)  # fmt: skip


@given(
    model_type=st.sampled_from(sorted(DEFAULTS)),
    changes=st.dictionaries(
        st.sampled_from([*DEFAULTS["deepseek_v3"], "mlp_layer_types", "text_config"]),
        VALUES,
        max_size=3,
    ),
)
def test_whatever_a_file_says_is_planned_or_refused(
    model_type: str, changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = config(tmp_path_factory.mktemp("model"), model_type, **changes)
    with suppress(CheckpointError):
        assert Subject.find(str(path)).parameters > 0
