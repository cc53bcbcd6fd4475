"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the files beside it decide.

The file describes the whole of encoding, and the `tokenizers` library that wrote it reads it.
Decoding goes token by token here (a stream has no whole text to decode), so the file's decoder must
be one of the two that byte-pair encodings have; any other is refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, NoReturn

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.loader.encoder import guarded
from octavo.loader.files import json_object, read_file
from octavo.loader.hf_config import default_of, text_config
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.loader.hf_special_tokens import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SpecialTokens,
    control_ids,
    read_special_tokens,
    text_of,
)
from octavo.loader.hf_tokenizer_class import differs, steps, tokenizer_class
from octavo.loader.pipeline_cost import unbounded
from octavo.loader.tokenizer import (
    END_OF_TURN,
    BpeTokenizer,
    byte_level_bytes,
    pipeline,
    sentencepiece_bytes,
)

GENERATION = "generation_config.json"
MAX_TOKENIZER = 256 << 20  # bytes; the largest known has 33 million
MAX_SUFFIX = 64  # characters; known ones have four
MAX_AROUND = 64  # tokens that every text gets; of the known families it is one or two
_CORRUPTS = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

log = logging.getLogger(__name__)


def hf_tokenizer(folder: HfFolder, vocab_size: int) -> BpeTokenizer:
    """Raises `CheckpointError` when a file is missing, broken or of an unknown kind."""
    return _Reader(folder, vocab_size).tokenizer()


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
        self.rebuilt = tokenizer_class(folder, self.values)
        # Vocabulary and merges go before the library has its own: they are 20 times the file.
        model = self.values.pop("model", None)
        model = model if isinstance(model, dict) else {}
        model = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
        if model.get("type") not in ("BPE", None):  # None: files of old versions leave it out
            self.fail(f"model type {model['type']!r} is not supported, only BPE")
        if prefix := model.get("continuing_subword_prefix"):
            # No decoder takes it off again, and the library aborts where it cuts a character.
            self.fail(f"continuing_subword_prefix {prefix!r} is not supported")
        suffix = model.get("end_of_word_suffix")
        if isinstance(suffix, str) and len(suffix) > MAX_SUFFIX:  # it is copied for every word
            self.fail(f"end_of_word_suffix has {len(suffix)} characters, more than {MAX_SUFFIX}")
        if model.get("dropout"):
            log.warning("%s: dropout %s is left off", path, model["dropout"])
        self.config = folder.json_if_any(TOKENIZER_CONFIG)
        if self.config.get("clean_up_tokenization_spaces") and self.config.get(_CORRUPTS):
            folder.fail(TOKENIZER_CONFIG, f"{_CORRUPTS} is not supported")
        self.pipeline: dict[str, Any] | None = None
        self.special, self.backend = self.build(data, model)

    def build(self, data: bytes, model: dict[str, Any]) -> tuple[SpecialTokens, Backend]:
        """The backend with all added tokens, as the folder's tokenizer class makes it."""
        rebuilt = self.rebuilt
        special = read_special_tokens(self.folder, self.values, rebuilt.names if rebuilt else {})
        text = data.decode()
        if rebuilt is not None:
            parts = rebuilt.parts(self.config)
            added = {token_id: token.content for token_id, token in special.added.items()}
            if differs(self.values, model, parts) or added != self.added_in_file():
                values = json.loads(text)
                kept = {key: values["model"].get(key, []) for key in ("vocab", "merges")}
                values |= parts | {"model": {"type": "BPE"} | parts["model"] | kept}
                values["added_tokens"] = []
                text = json.dumps(values)
                self.values |= {key: parts[key] for key in parts if key != "model"}
        self.reason = unbounded(self.values)
        if self.reason is not None:  # not even the texts of added tokens go through it here
            self.pipeline = pipeline(self.values)
            text = json.dumps(json.loads(text) | pipeline({}))
        try:
            backend = guarded(Backend.from_str, text)
            # Settings of a training pipeline. No prompt is cut or filled here.
            backend.no_truncation()
            backend.no_padding()
            if model.get("dropout"):
                backend.model.dropout = None
            guarded(special.add_to, backend)
            if rebuilt is not None and rebuilt.readds:
                named = (*special.named.values(), *special.extra)
                tokens = dict.fromkeys(text_of(token) for token in named)
                guarded(backend.add_tokens, [AddedToken(each, special=True) for each in tokens])
        except ValueError as error:
            self.fail(f"cannot be read: {error}")
        return special, backend

    def added_in_file(self) -> dict[int, str]:
        try:
            return {each["id"]: each["content"] for each in self.values.get("added_tokens") or []}
        except (KeyError, TypeError):
            self.fail("added_tokens are not as the library writes them")

    def tokenizer(self) -> BpeTokenizer:
        backend = self.backend
        try:
            to_bytes, strip = self.decoder()
            before, after = self.template()
        except (AttributeError, KeyError, TypeError) as error:  # it reads arrays as objects, too
            self.fail(f"post_processor is not as the library writes it: {error}")
        control = control_ids(backend)
        if self.config.get("split_special_tokens") is True:
            backend.encode_special_tokens = True
        named = self.special.texts
        bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        self.check_known("bos_token", [] if bos is None else [bos])
        tokenizer = BpeTokenizer(
            backend,
            vocab_size=self.vocab_size,
            to_bytes=to_bytes,
            control=control,
            bos_token_id=bos if bos is not None else self.configured("bos_token_id", None),
            before=before,
            after=after,
            eos_token_ids=self.stop_tokens(named, set(backend.get_added_tokens_decoder())),
            strip_leading_space=strip,
            special_tokens_map=named,
            unbounded=self.pipeline,
        )
        if self.pipeline is not None:
            log.warning(
                "%s: %s is not known to take bounded time and memory: texts are tokenized in a "
                "process with limits", self.folder.path / TOKENIZER, self.reason,
            )  # fmt: skip
            try:
                tokenizer.encode("")
            except ValueError as error:
                self.fail(f"cannot be used: {error}")
        return tokenizer

    def stop_tokens(self, named: dict[str, str], added: set[int]) -> set[int]:
        """Every token that ends a turn, whichever of the files says so."""
        stops = set()
        read, part = self.folder.json_if_any, text_config(self.folder)
        for file, values in (GENERATION, read(GENERATION)), (CONFIG, read(CONFIG)), (CONFIG, part):
            value = values.get("eos_token_id")
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
        value = (text_config(self.folder) | self.folder.json_if_any(CONFIG)).get(key)
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < self.vocab_size:
            self.folder.fail(CONFIG, f"{key} is {value!r}, outside 0 to {self.vocab_size - 1}")
        return value

    # ── Parts of the file ───────────────────────────────────────────────────────────────────────

    def decoder(self) -> tuple[Callable[[str], bytes], bool]:
        """What makes bytes of a token, and whether a text's first space is taken off again."""
        match steps(self.values.get("decoder"), "decoders"):
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
        for step in steps(self.values.get("post_processor"), "processors"):
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
                if len(before) + len(after) > MAX_AROUND:
                    self.fail(f"post_processor puts more than {MAX_AROUND} tokens around a text")
            if texts != 1:
                self.fail(f"post_processor has {texts} texts in its template for one")
        self.check_known("post_processor", [*before, *after])
        return before, after

    def check_known(self, key: str, token_ids: list[int]) -> None:
        """Tokens that every prompt may get must be the model's."""
        if (largest := max(token_ids, default=0)) >= self.vocab_size:
            self.fail(f"{key} has token {largest}, outside 0 to {self.vocab_size - 1}")

    def fail(self, reason: str) -> NoReturn:
        self.folder.fail(TOKENIZER, reason)
