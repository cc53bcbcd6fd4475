"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the files beside it decide.

The file describes the whole of encoding, and the `tokenizers` library that wrote it reads it.
Decoding goes token by token here (a stream has no whole text to decode), so the file's decoder must
be one of the two that byte-pair encodings have; any other is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from tokenizers import Tokenizer as Backend

from octavo.checkpoint.files import json_object, read_file
from octavo.checkpoint.hf_config import default_of
from octavo.checkpoint.hf_folder import CONFIG, HfFolder
from octavo.checkpoint.tokenizer import (
    END_OF_TURN,
    BpeTokenizer,
    byte_level_bytes,
    sentencepiece_bytes,
)

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION = "generation_config.json"
MAX_TOKENIZER = 256 << 20  # bytes; the largest known has 33 million


def hf_tokenizer(folder: HfFolder, vocab_size: int) -> BpeTokenizer:
    """Raises `CheckpointError` when a file is missing, broken or of an unknown kind."""
    return _Reader(folder, vocab_size).tokenizer()


def special_tokens(folder: HfFolder) -> dict[str, str]:
    """The tokens that the folder gives a part: ``bos_token``, ``eos_token``, ``pad_token``, …"""
    named: dict[str, str] = {}
    for file in (SPECIAL_TOKENS, TOKENIZER_CONFIG):  # the later one wins
        for key, value in folder.json_if_any(file).items():
            if not key.endswith("_token"):
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    folder.fail(file, f"{key} {text!r} has a lone surrogate")
                named[key] = text
            elif text is None:
                named.pop(key, None)
    return named


class _Reader:
    def __init__(self, folder: HfFolder, vocab_size: int) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        if not folder.has(TOKENIZER):
            folder.fail(
                TOKENIZER,
                "is missing, and the tokenizer is read from no other file (tokenizer.model, "
                "vocab.json): transformers' AutoTokenizer writes it with save_pretrained",
            )
        path = folder.path / TOKENIZER
        data = read_file(path, MAX_TOKENIZER)
        self.values = json_object(path, data)
        # Vocabulary and merges go before the library has its own: they are 20 times the file.
        model = self.values.pop("model", None)
        model = model if isinstance(model, dict) else {}
        model = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
        if model.get("type") not in ("BPE", None):  # None: files of old versions leave it out
            self.fail(f"model type {model['type']!r} is not supported, only BPE")
        if prefix := model.get("continuing_subword_prefix"):
            # No decoder takes it off again, and the library aborts where it cuts a character.
            self.fail(f"continuing_subword_prefix {prefix!r} is not supported")
        try:
            self.backend = Backend.from_str(data.decode())
        except BaseException as error:  # the library raises Exception, and panics beside it
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            self.fail(f"cannot be read: {error}")

    def tokenizer(self) -> BpeTokenizer:
        backend = self.backend
        # Settings of a training pipeline. No prompt is cut or filled here.
        backend.no_truncation()
        backend.no_padding()
        try:
            to_bytes, strip = self.decoder()
            before, after = self.template()
        except (AttributeError, KeyError, TypeError) as error:  # it reads arrays as objects, too
            self.fail(f"decoder or post_processor is not as the library writes it: {error}")
        added = backend.get_added_tokens_decoder()
        named = special_tokens(self.folder)
        special = {i for i, token in added.items() if token.special}
        special |= {i for text in named.values() if (i := backend.token_to_id(text)) in added}
        bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        self.check_known("bos_token", [] if bos is None else [bos])
        return BpeTokenizer(
            backend,
            vocab_size=self.vocab_size,
            to_bytes=to_bytes,
            control=special,
            bos_token_id=bos if bos is not None else self.configured("bos_token_id", None),
            before=before,
            after=after,
            eos_token_ids=self.stop_tokens(named, set(added)),
            strip_leading_space=strip,
        )

    def stop_tokens(self, named: dict[str, str], added: set[int]) -> set[int]:
        """Every token that ends a turn, whichever of the files says so."""
        stops = set()
        for file in (GENERATION, CONFIG):
            value = self.folder.json_if_any(file).get("eos_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is None:
                    continue
                if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                    self.folder.fail(
                        file, f"eos_token_id is {token_id!r}, outside 0 to {self.vocab_size - 1}"
                    )
                stops.add(token_id)
        texts = [named["eos_token"]] if "eos_token" in named else []
        for text in (*texts, *END_OF_TURN):
            token_id = self.backend.token_to_id(text)
            if token_id is not None and token_id < self.vocab_size and token_id in added:
                stops.add(token_id)
        if not stops and not self.folder.has(GENERATION):
            # Nothing says anything: transformers stops at the default of the model's class.
            default = default_of(self.folder, "eos_token_id")
            stops |= {default} if default is not None and default < self.vocab_size else set()
        return stops

    def configured(self, key: str, default: int | None) -> int | None:
        value = self.folder.json(CONFIG).get(key)
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < self.vocab_size:
            self.folder.fail(CONFIG, f"{key} is {value!r}, outside 0 to {self.vocab_size - 1}")
        return value

    # ── Parts of the file ───────────────────────────────────────────────────────────────────────

    def decoder(self) -> tuple[Callable[[str], bytes], bool]:
        """What makes bytes of a token, and whether a text's first space is taken off again."""
        match self.steps("decoder", "decoders"):
            case [{"type": "ByteLevel"}]:
                return byte_level_bytes, False
            case [{"type": "Metaspace", "replacement": "▁"} as step]:
                return sentencepiece_bytes, step.get("prepend_scheme", "always") != "never"
            case [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ] if rest in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
                return sentencepiece_bytes, bool(rest)
        shown = json.dumps(self.values.get("decoder"), ensure_ascii=False)[:200]
        return self.fail(f"decoder {shown} is not supported; ByteLevel and SentencePiece's are")

    def template(self) -> tuple[list[int], list[int]]:
        """The tokens that the post-processor puts before and after a text."""
        before: list[int] = []
        after: list[int] = []
        for step in self.steps("post_processor", "processors"):
            kind = step.get("type")
            if kind == "ByteLevel":  # moves offsets only
                continue
            if kind != "TemplateProcessing":
                self.fail(f"post_processor {kind!r} is not supported, only TemplateProcessing")
            texts = 0
            for piece in step["single"]:
                if "Sequence" in piece:
                    texts += 1
                    if piece["Sequence"]["id"] != "A":
                        self.fail("post_processor has a second text in its template for one")
                    continue
                name = piece["SpecialToken"]["id"]
                if name not in step["special_tokens"]:
                    self.fail(f"post_processor's template has {name!r}, no special token of it")
                if texts < 2:
                    (before, after)[texts].extend(step["special_tokens"][name]["ids"])
            if texts != 1:
                self.fail(f"post_processor has {texts} texts in its template for one")
        self.check_known("post_processor", [*before, *after])
        return before, after

    def check_known(self, key: str, token_ids: list[int]) -> None:
        """Tokens that every prompt may get must be the model's."""
        if (largest := max(token_ids, default=0)) >= self.vocab_size:
            self.fail(f"{key} has token {largest}, outside 0 to {self.vocab_size - 1}")

    def steps(self, key: str, inner: str) -> list[dict[str, Any]]:
        """The parts of a sequence, or the only one."""
        value = self.values.get(key)
        if value is None:
            return []
        steps = value.get(inner) if value.get("type") == "Sequence" else [value]
        # The library has read the file: what it understood has these types.
        assert isinstance(steps, list)
        return [step for part in steps for step in self.flat(part, inner)]

    def flat(self, step: dict[str, Any], inner: str) -> list[dict[str, Any]]:
        nested = step.get(inner) if step.get("type") == "Sequence" else None
        return [step] if nested is None else [s for part in nested for s in self.flat(part, inner)]

    def fail(self, reason: str) -> NoReturn:
        self.folder.fail(TOKENIZER, reason)
