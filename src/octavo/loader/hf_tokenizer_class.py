"""What a folder's tokenizer class makes of its tokenizer.json.

`AutoTokenizer` of transformers 5.24 takes most files as they are. Four classes of the supported
families build the pipeline anew instead: they take vocabulary, merges and post-processor from the
file, and bring normalizer, pre-tokenizer, decoder and the names of special tokens themselves
(models/{qwen2,llama,gemma,gpt2}/tokenization_*.py there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.loader.hf_special_tokens import TOKENIZER_CONFIG
from octavo.models.families import HF_TYPES, HF_WRAPPERS
from octavo.models.hf_type import HfType, HfWrapper

Json = dict[str, Any]

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerClass(NamedTuple):
    """``parts`` gives normalizer, pre_tokenizer, decoder and model settings from
    tokenizer_config.json; ``names`` are the special tokens that it names by default, or leaves
    without a name."""

    parts: Callable[[Json], Json]
    names: Mapping[str, str | None]
    readds: bool = False  # named tokens are added once more, with no flags but special


def tokenizer_class(folder: HfFolder, tokenizer: Json) -> TokenizerClass | None:
    """The class that rebuilds ``tokenizer`` (tokenizer.json); None if the file stands as it is."""
    config = folder.json_if_any(TOKENIZER_CONFIG)
    kind = folder.json_if_any(CONFIG).get("model_type")
    named = config.get("tokenizer_class") or folder.json_if_any(CONFIG).get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else ""
    known = _registered(kind) if isinstance(kind, str) else None
    registered = known.tokenizer if known else None
    if (known and known.tokenizer_overrules) or not named or registered == "":
        named = registered or ""
    elif named == "LlamaTokenizer" and _byte_level(tokenizer):
        named = ""
    found = _CLASSES.get(named)
    if found is None:
        return None
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    unknown = found.parts(config)["model"].get("unk_token")
    if not isinstance(vocabulary, dict) or (unknown is not None and unknown not in vocabulary):
        return None  # transformers refuses to make the class of such a file
    return found


def _registered(model_type: str) -> HfType | HfWrapper | None:
    if model_type in HF_TYPES:
        return HF_TYPES[model_type][1]
    return HF_WRAPPERS.get(model_type)


def _byte_level(tokenizer: Json) -> bool:
    return any(
        step.get("type") == "ByteLevel"
        for key, inner in (("pre_tokenizer", "pretokenizers"), ("decoder", "decoders"))
        for step in steps(tokenizer.get(key), inner)
    )


def steps(value: object, inner: str) -> list[Json]:
    """The parts of a sequence of tokenizer.json, however nested, or the only one. What is no object
    (the library reads arrays as objects, too) is a step of the type None."""
    if value is None:
        return []
    if not isinstance(value, dict):
        return [{"type": None}]
    if value.get("type") != "Sequence":
        return [value]
    parts = value.get(inner)
    if not isinstance(parts, list):
        return [{"type": None}]
    return [step for part in parts for step in steps(part, inner)]


def differs(tokenizer: Json, model: Json, parts: Json) -> bool:
    """Whether the class's ``parts`` are others than the file's, ``model`` without vocabulary."""
    ours = {key: value for key, value in model.items() if key != "type" and value}
    theirs = {key: value for key, value in parts["model"].items() if value}
    return ours != theirs or any(
        [_plain(step, key) for step in steps(tokenizer.get(key), inner)]
        != [_plain(step, key) for step in steps(parts[key], inner)]
        for key, inner in (
            ("normalizer", "normalizers"),
            ("pre_tokenizer", "pretokenizers"),
            ("decoder", "decoders"),
        )
    )


def _plain(step: Json, part: str) -> Json:
    """Without settings that change no token and no text."""
    if step.get("type") == "ByteLevel":
        idle = step.keys() - {"type"} if part == "decoder" else {"trim_offsets"}
        return {key: value for key, value in step.items() if key not in idle}
    return step


def _byte_level_step(**settings: bool) -> Json:
    settings = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True} | settings
    return {"type": "ByteLevel", **settings}


def _qwen2(config: Json, pattern: str = QWEN2_SPLIT) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    space = bool(config.get("add_prefix_space"))
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                split | {"invert": False},
                _byte_level_step(add_prefix_space=space, use_regex=False),
            ],
        },
        "decoder": _byte_level_step(),
        "model": {},
    }


def _gpt2(config: Json) -> Json:
    return {
        "normalizer": None,
        "pre_tokenizer": _byte_level_step(add_prefix_space=bool(config.get("add_prefix_space"))),
        "decoder": _byte_level_step(),
        "model": {},
    }


def _cohere(config: Json) -> Json:
    space = bool(config.get("add_prefix_space"))
    digits = {"type": "Digits", "individual_digits": True}
    step = _byte_level_step(add_prefix_space=space)
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, step]},
        "decoder": step,
        "model": {},
    }


def _spaces() -> list[Json]:
    return [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]


def _llama(config: Json) -> Json:
    space = config.get("add_prefix_space")
    space = True if space is None else bool(space)
    scheme = ("always" if config.get("legacy") else "first") if space else "never"
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": [*_spaces(), *strip]},
        "model": {"fuse_unk": True, "byte_fallback": True},
    }


def _gemma(config: Json) -> Json:
    unknown = config.get("unk_token", _GEMMA_NAMES["unk_token"])
    unknown = unknown.get("content") if isinstance(unknown, dict) else unknown
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": _spaces()},
        "model": {"fuse_unk": True, "byte_fallback": True, "unk_token": unknown},
    }


_END = "<|endoftext|>"
_GEMMA_NAMES = {
    "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>",
    "mask_token": "<mask>",
}  # fmt: skip
_COHERE_NAMES = {
    "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>",
    "pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>",
}  # fmt: skip
_CLASSES = {
    "Qwen2Tokenizer": TokenizerClass(
        _qwen2, {"eos_token": _END, "unk_token": _END, "pad_token": _END}, readds=True
    ),
    "Qwen3_5Tokenizer": TokenizerClass(
        lambda config: _qwen2(config, QWEN3_5_SPLIT),
        {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    ),
    "LlamaTokenizer": TokenizerClass(
        _llama, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    ),
    "GemmaTokenizer": TokenizerClass(_gemma, _GEMMA_NAMES),
    "CohereTokenizer": TokenizerClass(_cohere, _COHERE_NAMES),
    "GPT2Tokenizer": TokenizerClass(
        _gpt2, {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": None}
    ),
}
