"""Tokenizer folders with unusual added tokens, the same ones for the same seed.

Each is made of a recorded tokenizer (tokenizers/) and of tokens that one file or several add or
change, with flags, classes and names at random. Used by ``record_odd_folders.py``, which records
what transformers makes of them, and by the tests and benchmarks/tokenizer_check.py, which compare.
"""

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = ("gemma", "gpt2", "llama2", "llama2-metaspace", "llama3", "qwen2")
TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "olmo2",
    "mixtral", "qwen3_moe", None,
)  # fmt: skip
CLASSES = (
    None, "PreTrainedTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
    "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast",
    "GPT2Tokenizer", "GPT2TokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast",
)  # fmt: skip
CONTENTS = (
    "<|tool|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[INST]", "[/INST]", "\n\n",
    " spaced ", "two words", "<|Ünï|>", "中文", "the", "a", "▁▁", "Ġb", "ß", "İx", "<0x41>", "<s>",
    "</s>", "<|im_end|>", "<|im_start|>", "<unk>", "<|endoftext|>", "<end_of_turn>", "<image>",
    "<|end|>", "e\u0301", "é", "<｜end▁of▁sentence｜>", "12", "::", "<mask>", "<pad>",
)  # fmt: skip
WORDS = ("a", " b", "the", " The end", "\n", "  ", "é", "1234", "中", "x=1;", "<", "|>", "🙂", " ")


def build(path: Path, seed: int) -> list[str]:
    """Write the folder; the texts to try it on."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    base = HERE / "tokenizers" / kind
    values: dict[str, Any] = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("tokenizer_class", None)
    config.pop("chat_template", None)
    unknown = "<unk>" in values["model"]["vocab"]
    while True:
        model_type, named = rng.choice(TYPES), rng.choice(CLASSES)
        gemma = "Gemma" in (named or "") or model_type in ("gemma2", "gemma3_text")
        if unknown or not gemma:
            break
    if named:
        config["tokenizer_class"] = named
    tokens = rng.sample(CONTENTS, rng.randint(2, 7))
    _tokenizer_json(rng, values, tokens)
    files: dict[str, Any] = {"config.json": {"model_type": model_type} if model_type else {}}
    _config(rng, config, values, tokens)
    if rng.random() < 0.3:
        files["added_tokens.json"] = {
            text: _next_id(values) + at for at, text in enumerate(rng.sample(tokens, 2))
        }
    if rng.random() < 0.4:
        files["special_tokens_map.json"] = _map(rng, tokens)
    files |= {"tokenizer.json": values, "tokenizer_config.json": config}
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    present = [each["content"] for each in values["added_tokens"]]
    return _texts(rng, [*tokens, *present])


def _flags(rng: random.Random) -> dict[str, bool]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: rng.random() < (0.5 if name == "special" else 0.2) for name in names}


def _next_id(values: dict[str, Any]) -> int:
    ids = [*values["model"]["vocab"].values(), *(each["id"] for each in values["added_tokens"])]
    return max(ids) + 1


def _tokenizer_json(rng: random.Random, values: dict[str, Any], tokens: list[str]) -> None:
    present = {each["content"] for each in values["added_tokens"]}
    for text in tokens[: rng.randint(0, 2)]:
        if text not in present:
            token_id = values["model"]["vocab"].get(text, _next_id(values))
            added = {"id": token_id, "content": text} | _flags(rng)
            values["added_tokens"].append(added)
    values["added_tokens"].sort(key=lambda each: each["id"])
    for each in values["added_tokens"]:
        if rng.random() < 0.1:
            each |= _flags(rng)
    if rng.random() < 0.2:
        values["truncation"] = {
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
        }  # fmt: skip
    if rng.random() < 0.2:
        values["padding"] = {
            "strategy": {"Fixed": 50}, "direction": "Left", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": rng.choice(tokens),
        }  # fmt: skip


def _config(
    rng: random.Random, config: dict[str, Any], values: dict[str, Any], tokens: list[str]
) -> None:
    if rng.random() < 0.5:
        decoder = {}
        if rng.random() < 0.7:
            decoder = {
                str(each["id"]): {key: value for key, value in each.items() if key != "id"}
                for each in values["added_tokens"]
            }
        first = _next_id(values) + rng.choice((0, 0, 0, 5))
        for at, text in enumerate(rng.sample(tokens, rng.randint(1, len(tokens)))):
            known = values["model"]["vocab"].get(text)
            if all(each["content"] != text for each in decoder.values()):
                decoder[str(first + at if known is None else known)] = (
                    {"content": text} | _flags(rng)
                )  # fmt: skip
        config["added_tokens_decoder"] = decoder
    if rng.random() < 0.4:
        config["extra_special_tokens"] = (
            rng.sample(tokens, 2)
            if rng.random() < 0.6
            else {"image_token": tokens[0], "boi_token": tokens[1]}
        )
    if rng.random() < 0.3:
        config["additional_special_tokens"] = rng.sample(tokens, 2)
    for name in ("sep_token", "mask_token", "pad_token", "unk_token", "eos_token", "image_token"):
        if rng.random() < 0.15 and (name != "unk_token"):
            config[name] = rng.choice(
                [rng.choice(tokens), None, {"__type": "AddedToken", "content": rng.choice(tokens)}]
            )
            if isinstance(config[name], dict):
                config[name] |= _flags(rng)
    for name, choices in (
        ("add_prefix_space", (True, False, None)),
        ("legacy", (True, False, None)),
        ("add_bos_token", (True, False)),
        ("clean_up_tokenization_spaces", (True, False)),
        ("split_special_tokens", (True, False, False)),
    ):
        if rng.random() < 0.2:
            config[name] = rng.choice(choices)


def _map(rng: random.Random, tokens: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["sep_token"] = {"content": rng.choice(tokens)} | _flags(rng)
    if rng.random() < 0.5:
        found["pad_token"] = rng.choice(tokens)
    if rng.random() < 0.5:
        found["additional_special_tokens"] = rng.sample(tokens, 2)
    return found


def _texts(rng: random.Random, tokens: list[str]) -> list[str]:
    texts = [f"x{token}y {token} {token}{token}z" for token in tokens[:5]]
    for _ in range(6):
        parts = (rng.choice(rng.choice((tokens, WORDS))) for _ in range(rng.randint(2, 9)))
        texts.append("".join(parts))
    return texts
