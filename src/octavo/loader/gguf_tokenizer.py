"""Builds the tokenizer that a GGUF file's ``tokenizer.ggml.*`` metadata describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from octavo import _native
from octavo.loader.gguf import GgufFile, StringArray
from octavo.loader.pre_tokenizers import CUTS, REGEXES
from octavo.loader.tokenizer import (
    END_OF_TURN,
    SPACE,
    BpeTokenizer,
    byte_level_bytes,
    pipeline,
    sentencepiece_bytes,
)
from octavo.models.families import ARCHITECTURES

# Token types (gguf specification, tokenizer.ggml.token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


# What chat templates call the tokens of which GGUF gives the ids.
_PARTS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "separator",
          "mask": "mask"}  # fmt: skip
MAX_TOKEN = 512  # characters; real vocabularies stay far below


def gguf_tokenizer(file: GgufFile, vocab_size: int) -> BpeTokenizer:
    """Raises `CheckpointError` when the vocabulary is missing, broken or of an unknown kind."""
    return _Reader(file, vocab_size).tokenizer()


class _Reader:
    def __init__(self, file: GgufFile, vocab_size: int) -> None:
        self.file = file
        self.family = ARCHITECTURES[file.get("general.architecture", str)][0]
        self.vocab_size = vocab_size
        strings = file.strings("tokenizer.ggml.tokens")
        if strings is None:
            file.fail("has no tokenizer: metadata key tokenizer.ggml.tokens is missing")
        if len(strings) != vocab_size:
            file.fail(
                f"tokenizer.ggml.tokens has {len(strings)} tokens for a vocabulary of {vocab_size}"
            )
        self.tokens = strings.text()
        types = self.column("tokenizer.ggml.token_type", np.integer, "an integer")
        self.types = np.full(vocab_size, NORMAL) if types is None else types.astype(np.int64)
        if (wrong := np.flatnonzero((self.types < NORMAL) | (self.types > BYTE))).size:
            kind = self.types[wrong[0]]
            self.fail("token_type", f"is {kind} for token {wrong[0]}, not from {NORMAL} to {BYTE}")
        self.scores = self.column("tokenizer.ggml.scores", np.floating, "a float")
        if self.scores is not None and not np.isfinite(self.scores).all():
            first = np.flatnonzero(~np.isfinite(self.scores))[0]
            self.fail("scores", f"is {self.scores[first]} for token {first}")

    def tokenizer(self) -> BpeTokenizer:
        kind = self.file.get("tokenizer.ggml.model", str)
        if kind == "gpt2":
            return self.byte_level()
        if kind not in ("llama", "gemma4"):
            self.fail("model", f"{kind!r} is not supported; supported are gpt2, llama, gemma4")
        return self.sentencepiece()

    def byte_level(self) -> BpeTokenizer:
        pre = self.file.get("tokenizer.ggml.pre", str, "default")
        if pre not in CUTS:
            self.fail("pre", f"{pre!r} is not supported; supported are {', '.join(CUTS)}")
        cut = CUTS[pre]
        merges = self.file.strings("tokenizer.ggml.merges")
        if merges is None:
            self.fail("merges", "is missing")
        backend = self.backend(_pairs(merges), ignore_merges=cut.whole_words)
        steps: list[pre_tokenizers.PreTokenizer] = []
        for regex in cut.splits:
            steps.append(pre_tokenizers.Split(Regex(regex), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.gpt2))
        cutting = Tokenizer(models.BPE())
        cutting.pre_tokenizer = pre_tokenizers.Sequence(steps)
        bounded = REGEXES.issuperset(cut.splits)
        if bounded:
            backend.pre_tokenizer = cutting.pre_tokenizer
        return self.finish(
            backend,
            byte_level_bytes,
            add_bos=cut.bos,
            unbounded=None if bounded else pipeline(json.loads(cutting.to_str())),
        )

    def sentencepiece(self) -> BpeTokenizer:
        merged = self.family.merged_spaces
        if merged:
            # Runs of spaces are stored as spaces, but the text they meet has ▁ in their place: they
            # are reached by merging, and are no added tokens.
            runs = [i for i, t in enumerate(self.tokens) if " " in t and not t.strip(" ")]
            for index in runs:
                self.tokens[index] = SPACE * len(self.tokens[index])
                self.types[index] = NORMAL
        merges = self.file.strings("tokenizer.ggml.merges")
        pairs = self.derived_merges(by_position=merged) if merges is None else _pairs(merges)
        prefix = self.file.get("tokenizer.ggml.add_space_prefix", bool, not merged)
        backend = self.backend(pairs, byte_fallback=True)
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
        if prefix:  # also to a space, and behind each special token
            steps.insert(0, normalizers.Prepend(SPACE))
        backend.normalizer = normalizers.Sequence(steps)
        return self.finish(backend, sentencepiece_bytes, add_bos=True, leading_space=prefix)

    def derived_merges(self, *, by_position: bool) -> list[tuple[str, str]]:
        """The merges of a vocabulary without any: by score, or by position as in Gemma's files,
        which score all added tokens alike."""
        longest = max(map(len, self.tokens))
        if longest > MAX_TOKEN:
            self.fail("tokens", f"holds a token of {longest} characters, more than {MAX_TOKEN}")
        if by_position:
            ranks = np.arange(self.vocab_size, dtype=np.int32)
        else:
            if self.scores is None:
                self.fail("scores", "is missing")
            ranks = np.unique(-self.scores, return_inverse=True)[1].astype(np.int32)
        # Added tokens never reach the merges: they are cut out of the text before.
        usable = ~np.isin(self.types, (CONTROL, USER_DEFINED))
        return implied_merges(self.tokens, ranks, usable)

    # ── Parts ───────────────────────────────────────────────────────────────────────────────────

    def backend(self, merges: list[tuple[str, str]], **options: bool) -> Tokenizer:
        vocab = {token: index for index, token in enumerate(self.tokens)}
        if len(vocab) != self.vocab_size:
            twice = next(t for i, t in enumerate(self.tokens) if vocab[t] != i)
            self.fail("tokens", f"holds {twice!r} twice")
        unknown = self.token_id("unknown") if options.get("byte_fallback") else None
        try:
            model = models.BPE(
                vocab,
                merges,
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=unknown is not None,
                **options,
            )
        except Exception as error:  # the library raises plain Exception
            self.fail("merges", f"does not fit the tokens: {error}")
        return Tokenizer(model)

    def finish(
        self,
        backend: Tokenizer,
        to_bytes: Callable[[str], bytes],
        *,
        add_bos: bool,
        leading_space: bool = False,
        unbounded: dict[str, Any] | None = None,
    ) -> BpeTokenizer:
        control, user_defined = self.of_type(CONTROL), self.of_type(USER_DEFINED)
        # Both are matched whole in the text, before anything else.
        backend.add_special_tokens([self.added(i) for i in control])
        backend.add_tokens([self.added(i) for i in user_defined])
        eos = [self.token_id(name) for name in ("eos", "eot", "eom")]
        added = {*control, *user_defined}
        turns = [i for text in END_OF_TURN if (i := backend.token_to_id(text)) in added]
        bos = self.token_id("bos")
        add_bos = self.file.get("tokenizer.ggml.add_bos_token", bool, add_bos)
        add_eos = self.file.get("tokenizer.ggml.add_eos_token", bool, False)
        return BpeTokenizer(
            backend,
            vocab_size=self.vocab_size,
            to_bytes=to_bytes,
            control=[*control, *self.of_type(UNKNOWN)],
            verbatim=[*control, *user_defined, *self.of_type(UNKNOWN)],
            bos_token_id=bos,
            before=[bos] if add_bos and bos is not None else [],
            after=[eos[0]] if add_eos and eos[0] is not None else [],
            eos_token_ids=[i for i in (*eos, *turns) if i is not None],
            strip_leading_space=leading_space,
            unbounded=unbounded,
            special_tokens_map={
                f"{name}_token": self.tokens[token_id]
                for name, key in _PARTS.items()
                if (token_id := self.token_id(key)) is not None
            },
        )

    def added(self, token_id: int) -> AddedToken:
        token = self.tokens[token_id]
        # GGUF has no place for the white space that Phi-3's tokens take along; this is llama.cpp's
        # rule. (Phi-4's are of a byte-level vocabulary.)
        takes_space = (
            self.family.greedy_tokens
            and self.file.get("tokenizer.ggml.model", str) == "llama"
            and token not in ("<unk>", "<s>", "<|endoftext|>")
        )
        return AddedToken(token, normalized=False, rstrip=takes_space)

    def of_type(self, kind: int) -> list[int]:
        return [int(index) for index in np.flatnonzero(self.types == kind)]

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.file.get(key, int, None)
        if value is not None and not 0 <= value < self.vocab_size:
            self.file.fail(f"{key} is {value}, outside the vocabulary of {self.vocab_size}")
        return value

    def column(self, key: str, kind: Any, called: str) -> npt.NDArray[Any] | None:
        """One number a token, of ``kind``; None if the file has none."""
        values = self.file.numbers(key)
        if values is None:
            return None
        if len(values) != self.vocab_size:
            self.file.fail(f"{key} has {len(values)} entries for {self.vocab_size} tokens")
        if not np.issubdtype(values.dtype, kind):
            self.file.fail(f"{key} is an array of {values.dtype}, not of {called} a token")
        return values

    def fail(self, key: str, reason: str) -> NoReturn:
        self.file.fail(f"tokenizer.ggml.{key} {reason}")


def implied_merges(
    tokens: list[str], ranks: npt.NDArray[np.int32], usable: npt.NDArray[np.bool_]
) -> list[tuple[str, str]]:
    """The merges that a SentencePiece-style BPE vocabulary implies, best (lowest rank) first.

    Any two neighbours that spell a token may merge. At most one pair of parts a token is listed,
    the one that can happen (kernels/bind/merges.cpp).
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    cuts = _native.merge_cuts(
        np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32),
        np.concatenate([[0], np.cumsum(lengths)]),
        ranks,
        usable.astype(np.uint8),
    )
    merged = np.flatnonzero(cuts)
    # Among equal ranks longer parts go first, as the native code has it.
    keys = (cuts[merged] - lengths[merged], -cuts[merged], ranks[merged])
    order = merged[np.lexsort(keys)]
    return [
        (tokens[i][:cut], tokens[i][cut:])
        for i, cut in zip(order.tolist(), cuts[order].tolist(), strict=True)
    ]


def _pairs(merges: StringArray) -> list[tuple[str, str]]:
    """Merges as files list them: two parts with a space between."""
    return [(left, right) for left, _, right in (line.partition(" ") for line in merges.text())]
