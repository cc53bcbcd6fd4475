"""A checkpoint's tokenizer and chat template as the files of a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, processors

from octavo.loader.base import Checkpoint
from octavo.loader.chat_template import JinjaChatTemplate
from octavo.loader.gguf import GgufFile
from octavo.loader.tokenizer import KINDS, SPACE, BpeTokenizer, byte_level_bytes
from octavo.tools.quantize.state import QuantizeError, write_whole

# What a folder has beside its weights; none of it depends on how they are stored.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def copy_files(source: Path, folder: Path) -> None:
    """From one Hugging Face folder to another."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_files(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """The files that a GGUF file's metadata amount to; returns the token ids for config.json."""
    tokenizer = checkpoint.tokenizer
    if not isinstance(tokenizer, BpeTokenizer):
        raise QuantizeError(f"{checkpoint.path}: its tokenizer has no tokenizer.json")
    file = GgufFile(checkpoint.path)
    ids: dict[str, Any] = {}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in names.items():
        ids[name] = file.get(f"tokenizer.ggml.{key}_token_id", int, None)
    _write(folder / "tokenizer.json", json.loads(_tokenizer_json(tokenizer, ids["unk"])))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    for name, token_id in ids.items():
        if token_id is not None:
            settings[f"{name}_token"] = tokenizer.token_text(token_id)
    if isinstance(checkpoint.chat_template, JinjaChatTemplate):
        settings["chat_template"] = checkpoint.chat_template.source
        write_whole(folder / "chat_template.jinja", checkpoint.chat_template.source.encode())
    _write(folder / "tokenizer_config.json", settings)
    stops = sorted(tokenizer.eos_token_ids)
    chosen = {
        "bos_token_id": ids["bos"],
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": ids["pad"],
    }
    _write(folder / "generation_config.json", {k: v for k, v in chosen.items() if v is not None})
    return {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}


def _tokenizer_json(tokenizer: BpeTokenizer, unknown: int | None) -> str:
    """With the decoder and the framing that Octavo does by itself."""
    backend = Tokenizer.from_str(tokenizer.backend_json())
    if unknown is not None:
        text = backend.id_to_token(unknown)
        if text is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False)])
    if tokenizer.kind == KINDS[byte_level_bytes]:
        backend.decoder = decoders.ByteLevel()
    else:
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if tokenizer.strip_leading_space:
            steps.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(steps)
    before, after = tokenizer.framing
    if before or after:
        pieces = {i: tokenizer.token_text(i) for i in (*before, *after)}
        backend.post_processor = processors.TemplateProcessing(
            single=[*(pieces[i] for i in before), "$A", *(pieces[i] for i in after)],
            pair=[*(pieces[i] for i in before), "$A", *(pieces[i] for i in before), "$B:1"],
            special_tokens=[(text, i) for i, text in pieces.items()],
        )
    return str(backend.to_str())


def _write(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
