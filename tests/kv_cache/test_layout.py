"""How layers share the pool: groups of equal length, one block size."""

import pytest

from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.models.config import Activation, Layer, ModelConfig, Rope


def model(windows: list[int | None], kv_heads: int = 3, head_dim: int = 64) -> ModelConfig:
    rope = Rope(theta=10000.0, dim=head_dim, interleaved=True)
    return ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=kv_heads * head_dim,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=128,
        context_length=2048,
        norm_eps=1e-5,
        activation=Activation.SILU,
        attention_scale=head_dim**-0.5,
        tied_embeddings=True,
        layers=tuple(Layer(rope, window) for window in windows),
    )


def test_one_group_when_all_layers_are_alike() -> None:
    layout = KvLayout.of(model([None] * 30))
    assert len(layout.groups) == 1
    assert layout.bytes_per_token == 23_040  # SmolLM2-135M in 16 bits
    assert layout.block_bytes == 16 * 23_040


def test_gemma_layers_make_six_groups_of_three() -> None:
    layout = KvLayout.of(model([512, 512, 512, 512, 512, None] * 3, kv_heads=1, head_dim=256))
    assert [group.window for group in layout.groups] == [None, 512, 512, 512, 512, 512]
    assert {len(group.layers) for group in layout.groups} == {3}
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(18))
    assert layout.place(5) == (0, 0)
    with pytest.raises(KeyError):
        layout.place(18)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_codes_hold_more_tokens_in_the_same_memory(head_dim: int) -> None:
    def block(dtype: KvDtype) -> int:
        return KvLayout.of(model([None] * 4, head_dim=head_dim), dtype=dtype).block_bytes

    assert block(KvDtype.BF16) == block(KvDtype.FP16) >= 1.9 * block(KvDtype.INT8)
    assert block(KvDtype.BF16) >= 3.5 * block(KvDtype.INT4)


def test_names_of_dtypes() -> None:
    assert KvDtype.of("auto") is KvDtype.of("bfloat16") is KvDtype.of("bf16") is KvDtype.BF16
    assert KvDtype.of("float16") is KvDtype.FP16
    assert KvDtype.of("fp8") is KvDtype.of("fp8_e4m3") is KvDtype.of("fp8_e5m2") is KvDtype.FP8
    with pytest.raises(ValueError, match="CPUs have no fp8 units"):
        KvDtype.FP8.check_served()
    for dtype in KvDtype.served():
        dtype.check_served()
    for name in ("fp9", "int", ""):
        with pytest.raises(ValueError, match=r"not supported; auto, bf16, fp16, int8, int4 are"):
            KvDtype.of(name)
