"""A folder's tokenizer as ``tokenizer.ggml.*`` keys, and whether it still cuts texts the same.

The inverse of loader/gguf_tokenizer.py. GGUF names a way of cutting texts where tokenizer.json
spells it out, so a way without a name is refused. A SentencePiece-style vocabulary goes without its
merges: readers merge by the tokens' scores, which are made of the merges' order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from octavo.loader.base import Checkpoint
from octavo.loader.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED
from octavo.loader.pre_tokenizers import CUTS, DIGIT, Cut
from octavo.loader.tokenizer import (
    END_OF_TURN,
    KINDS,
    SPACE,
    BpeTokenizer,
    byte_level_bytes,
    sentencepiece_bytes,
)
from octavo.tools.quantize.gguf_writer import Value
from octavo.tools.quantize.state import QuantizeError

_PREFIX = "tokenizer.ggml."
# Both ways of cutting must agree on these …
TEXTS = (
    "Hello world! It's 1234567890 o'clock; they'll've said: “don’t”.",
    "two  spaces,   three,    four\tand a tab\n\n\nlines \n  of",
    "def f(x):\n\treturn x**2 - 10000 # 3.14e-05",
    "Größe, naïve, façade — cinquième élève; Привет, мир! Ελληνικά;",
    "日本語のテキスト。한국어 텍스트 中文，标点 ไทย हिन्दी עברית العربية",
    "🙂👩‍👩‍👧 ½ ² ﬁ İıẞß\u200d\u00a0\u3000x\r\ny ~`!@#$%^&*()_+-=[]{}|;':\",./<>?\\",
    "CamelCaseWords and SHOUTING, snake_case_words, http://example.org/a?b=c&d=1#e",
    "trailing ", "\n", "a", "1", "",
)  # fmt: skip
# … and may differ on these. GGUF's SentencePiece-style tokenizers put a space before a text that
# has one already and behind special tokens, as SentencePiece does, and some folders' do not; and ▁
# is a space to them.
ODD = (" ", " leading", "  two", f"x {SPACE * 2} y")


def vocabulary(checkpoint: Checkpoint) -> tuple[dict[str, Value], list[str]]:
    """The keys, and what a reader of them should know. Raises `QuantizeError` for a tokenizer that
    no such keys describe."""
    return _Vocabulary(checkpoint).keys()


def compare_tokenizers(checkpoint: Checkpoint, found: Checkpoint) -> list[str]:
    """Raises `QuantizeError` if ``found`` cuts texts otherwise, or ends on other tokens; where only
    odd texts are, that is worth a note."""
    ours, theirs = checkpoint.tokenizer, found.tokenizer
    for text in TEXTS:
        if ours.encode(text) != theirs.encode(text):
            raise _refusal(checkpoint, f"{text!r} would have other tokens")
    if not isinstance(ours, BpeTokenizer) or not isinstance(theirs, BpeTokenizer):
        return []
    if ours.eos_token_ids != theirs.eos_token_ids:
        raise _refusal(
            checkpoint,
            f"the tokens that end a text are {sorted(ours.eos_token_ids)}, not "
            f"{sorted(theirs.eos_token_ids)}",
        )
    special = [ours.token_text(i) for i in range(ours.vocab_size) if ours.is_special(i)]
    texts = [*ODD]
    for token in dict.fromkeys((*special[:8], *special[-8:])):
        texts += [f"Hi{token}there", f"Hello {token} 1\n{token}\n"]
    others = [text for text in texts if ours.encode(text) != theirs.encode(text)]
    if not others:
        return []
    return [f"texts like {others[0]!r} have other tokens in GGUF files than in the folder"]


class _Steps(NamedTuple):
    """The parts of a pipeline of tokenizer.json, none of which is a sequence."""

    normalizer: list[dict[str, Any]]
    pre_tokenizer: list[dict[str, Any]]


class _Vocabulary:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        tokenizer = checkpoint.tokenizer
        if not isinstance(tokenizer, BpeTokenizer):
            raise _refusal(checkpoint, "it is no byte-pair encoding")
        self.tokenizer = tokenizer
        self.size = checkpoint.config.vocab_size
        self.named = tokenizer.special_tokens_map
        spec = json.loads(tokenizer.backend_json())
        self.model: dict[str, Any] = spec["model"]
        self.steps = _Steps(
            list(_flat(spec["normalizer"], "normalizers")),
            list(_flat(spec["pre_tokenizer"], "pretokenizers")),
        )
        self.added = {each["id"]: each["content"] for each in spec["added_tokens"]}
        self.ids: dict[str, int] = self.model["vocab"] | {t: i for i, t in self.added.items()}

    def keys(self) -> tuple[dict[str, Value], list[str]]:
        if self.tokenizer.kind == KINDS[byte_level_bytes]:
            own, notes = self.byte_level()
        else:
            own, notes = self.sentencepiece(), []
        own |= self.framing() | self.parts()
        return {_PREFIX + name: value for name, value in own.items()}, notes

    # ── The two spellings ───────────────────────────────────────────────────────────────────────

    def byte_level(self) -> tuple[dict[str, Value], list[str]]:
        notes = []
        match self.steps.normalizer:
            case []:
                pass
            case [{"type": "NFC"}]:
                notes = ["GGUF has no place for the tokenizer's Unicode normalization (NFC): texts "
                         "that are not in that form have other tokens"]  # fmt: skip
            case _:
                self.refuse("normalizer")
        merges = [each if isinstance(each, str) else " ".join(each) for each in self.merges()]
        found: dict[str, Value] = {"model": "gpt2", "pre": self.cut(), "merges": merges}
        return found | self.tokens(), notes

    def cut(self) -> str:
        """What GGUF calls the way in which texts are cut before merging."""
        splits = []
        for step in self.steps.pre_tokenizer[:-1]:
            match step:
                case {"type": "Digits", "individual_digits": True}:
                    splits.append(DIGIT)
                case {
                    "type": "Split",
                    "pattern": {"Regex": str(regex)},
                    "invert": False,
                    **rest,
                } if rest == {"behavior": "Isolated"}:
                    splits.append(regex)
                case _:
                    self.refuse("pre_tokenizer")
        match self.steps.pre_tokenizer[-1:]:
            case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(gpt2)}]:
                wanted = Cut(tuple(splits), gpt2, bool(self.model.get("ignore_merges")))
            case _:
                self.refuse("pre_tokenizer")
        for name, cut in CUTS.items():
            if cut._replace(bos=False) == wanted:
                return name
        return self.refuse("pre_tokenizer")

    def sentencepiece(self) -> dict[str, Value]:
        if not self.model.get("byte_fallback"):
            self.refuse("model's byte_fallback")
        scores = np.zeros(self.size, np.float32)
        ranked = [left + right for left, right in self.pairs()]
        for rank, token in enumerate(dict.fromkeys(ranked)):
            token_id = self.ids.get(token, self.size)
            if token_id < self.size:
                scores[token_id] = -1.0 - rank
        found: dict[str, Value] = {"model": "llama", "pre": "default", "scores": scores}
        return found | self.tokens() | {"add_space_prefix": self.space_prefix()}

    def space_prefix(self) -> bool:
        """Whether a space goes before a text."""
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = {"type": "Prepend", "prepend": SPACE}
        # All spaces are gone when it comes to this: it cuts nothing.
        idle = {"type": "Split", "pattern": {"String": " "}}
        normalizer, pre_tokenizer = self.steps
        if not pre_tokenizer or idle.items() <= pre_tokenizer[0].items():
            if normalizer == [replace]:
                return False
            if normalizer == [prepend, replace]:
                return True
            self.refuse("normalizer")
        match pre_tokenizer:
            case [{"type": "Metaspace", "replacement": "▁", "split": False, **rest}]:
                if not normalizer:
                    return bool(rest.get("prepend_scheme", "always") != "never")
        return self.refuse("pre_tokenizer")

    def merges(self) -> list[Any]:
        merges = self.model["merges"]
        assert isinstance(merges, list)
        return merges

    def pairs(self) -> Iterator[tuple[str, str]]:
        for each in self.merges():
            left, _, right = (
                each.partition(" ") if isinstance(each, str) else (each[0], "", each[1])
            )
            yield left, right

    # ── Columns ─────────────────────────────────────────────────────────────────────────────────

    def tokens(self) -> dict[str, Value]:
        """Every id's token and type. Ids without a token become tokens that no text has; tokens
        beyond the embedding, of pictures in a model's files for text, are left out."""
        spelled = self.tokenizer.kind != KINDS[byte_level_bytes]
        texts = {i: text for text, i in self.ids.items() if i < self.size}
        tokens, types = [], np.full(self.size, NORMAL, np.int32)
        for i in range(self.size):
            text = texts.get(i)
            if text is None:
                text, types[i] = f"[PAD{i}]", UNUSED
                while text in self.ids:
                    text = f"[{text}]"
            elif self.tokenizer.is_special(i):
                types[i] = CONTROL
            elif i in self.added:
                # Of texts as they are written, where the other tokens have ▁ for a space.
                types[i], text = USER_DEFINED, text.replace(SPACE, " ") if spelled else text
            elif spelled and len(text) == 6 and len(sentencepiece_bytes(text)) == 1:
                types[i] = BYTE
            tokens.append(text)
        return {"tokens": tokens, "token_type": types}

    def framing(self) -> dict[str, Value]:
        """What is put before and after a text: BOS and EOS, or nothing."""
        before, after = self.tokenizer.framing
        bos, eos = self.tokenizer.bos_token_id, self.eos()
        if before not in ([], [bos]) or after not in ([], [eos]):
            self.refuse("post_processor")
        return {"add_bos_token": bool(before), "add_eos_token": bool(after)}

    def parts(self) -> dict[str, Value]:
        """The ids of tokens with a part to play."""
        found = {
            "bos": self.tokenizer.bos_token_id,
            "eos": self.eos(),
            "unknown": self.ids.get(self.model.get("unk_token") or ""),
            "padding": self.ids.get(self.named.get("pad_token", "")),
        }
        # Readers know these by their names; for what ends a text besides there are two keys.
        known = {self.ids.get(text) for text in END_OF_TURN} & self.added.keys()
        others = sorted(self.tokenizer.eos_token_ids - known - {found["eos"]})
        if len(others) > 2:
            raise _refusal(self.checkpoint, f"tokens {others} end a text besides {found['eos']}")
        found |= dict(zip(("eot", "eom"), others, strict=False))
        return {
            f"{name}_token_id": token_id
            for name, token_id in found.items()
            if token_id is not None and token_id < self.size
        }

    def eos(self) -> int | None:
        named = self.named.get("eos_token")
        stops = self.tokenizer.eos_token_ids
        if named is not None and (token_id := self.ids.get(named)) in stops:
            return token_id
        return min(stops, default=None)

    def refuse(self, part: str) -> NoReturn:
        raise _refusal(self.checkpoint, f"its {part} is none that GGUF has a name for")


def _flat(value: Any, inner: str) -> Iterator[dict[str, Any]]:
    if value is None:
        return
    if value["type"] != "Sequence":
        yield value
        return
    for step in value[inner]:
        yield from _flat(step, inner)


def _refusal(checkpoint: Checkpoint, reason: str) -> QuantizeError:
    return QuantizeError(
        f"{checkpoint.path}: GGUF has no way to say the same of this tokenizer ({reason}): choose "
        "--format gptq, awq or compressed-tensors"
    )
