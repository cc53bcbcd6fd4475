"""Presets have the parameters that are published of their models."""

from pathlib import Path

import pytest

from octavo.loader.base import CheckpointError
from octavo.loader.names import HUB_IDS, preset
from octavo.tools.plan.presets import PRESETS
from octavo.tools.plan.subject import Subject

# Elements of the weights as published (the totals of their safetensors files), or as transformers
# counts them (tests/oracle/count_presets.py) where rounded totals are all that is published. A tied
# head is not counted, where files have it twice, and nor are layers that only draft.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-small-3.2-24b": 23_572_403_200,
    "ministral-3-3b": 3_429_006_336,
    "ministral-3-8b": 8_489_553_920,
    "ministral-3-14b": 13_506_073_600,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-4-e2b": 4_628_569_379,
    "gemma-4-e4b": 7_463_013_418,
    "gemma-4-12b": 11_907_350_320,
    "gemma-4-26b-a4b": 25_233_141_790,
    "gemma-4-31b": 30_697_345_340,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "command-r7b": 8_028_033_024,
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-2.6b": 2_562_974_848,
    "lfm2-8b-a1b": 8_339_930_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "mistral-small-4": 118_972_826_624,
    "glm-4.7-flash": 29_943_393_920,
}


def test_every_preset_has_its_published_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))  # else it would be a pulled file that is read
    assert {name: Subject.find(name).parameters for name in PRESETS} == PARAMETERS


def test_every_name_of_a_preset_says_where_its_weights_are() -> None:
    assert list(HUB_IDS) == list(PRESETS)


def test_names_are_forgiven_their_spelling() -> None:
    assert preset("Llama-2-7b-chat-hf") == "llama-2-7b"
    assert preset("Qwen2.5_7B Instruct") == "qwen2.5-7b"
    assert preset("llama_2_7b_chat_hf") == "llama-2-7b"
    assert preset("llama3.1-8B") == "llama-3.1-8b"
    assert preset("gemma-2-9b-it") == "gemma-2-9b"
    assert preset("llama") is None
    assert Subject.find("LLAMA-3-8B").parameters == PARAMETERS["llama-3-8b"]


@pytest.mark.parametrize("name", ["llama-9-8b", "nothing"])
def test_an_unknown_model_is_one_error_that_lists_the_presets(name: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"unknown model .*known presets are llama-2-7b, "
    ) as e:
        Subject.find(name)
    assert "\n" not in str(e.value)
    if name == "llama-9-8b":
        assert "did you mean llama-" in str(e.value)


def test_a_stretched_context_is_the_models() -> None:
    config = Subject.find("llama-3.1-8b").program.config
    assert config.context_length == 131072
    assert config.layers[0].rope.factors[0] == 1.0
    assert config.layers[0].rope.factors[-1] == 8.0
