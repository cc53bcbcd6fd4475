"""Every tokenizer that files of the families name is one that Octavo has."""

import pytest

from octavo.loader.hf_tokenizer_class import _CLASSES
from octavo.loader.pre_tokenizers import CUTS
from octavo.models.families import HF_TYPES, HF_WRAPPERS

# What llama.cpp's converter calls the byte-level vocabularies of families.
PRE = [
    "command-r",
    "dbrx",
    "gpt-4o",
    "lfm2",
    "llama-bpe",
    "qwen2",
    "qwen35",
    "refact",
    "smaug-bpe",
    "smollm",
    "tekken",
]


@pytest.mark.parametrize("name", PRE)
def test_cuts_of_gguf_files(name: str) -> None:
    assert name in CUTS


@pytest.mark.parametrize("model_type", [*HF_TYPES, *HF_WRAPPERS])
def test_classes_of_folders(model_type: str) -> None:
    known = HF_TYPES[model_type][1] if model_type in HF_TYPES else HF_WRAPPERS[model_type]
    assert not known.tokenizer or known.tokenizer in _CLASSES
