"""Whether a tokenizer's pipeline takes bounded time and memory, as far as its file tells.

Normalizers can multiply a text, and regular expressions can take exponential time. What the known
families do is bounded; whatever else a file may say is not taken to be.
"""

from __future__ import annotations

from typing import Any

from octavo.loader.hf_tokenizer_class import steps
from octavo.loader.pre_tokenizers import REGEXES

_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt", "BertNormalizer"}
)
_PRE_TOKENIZERS = frozenset(
    {"Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer",
     "CharDelimiterSplit", "UnicodeScripts"}
)  # fmt: skip
# Each may make one character a few; several of them make a few of each of these.
_GROWING = frozenset({"NFD", "NFKC", "NFKD", "BertNormalizer", "Prepend", "ByteLevel", "Metaspace"})
_MOST_GROWING = 3
_MOST_STEPS = 16


def unbounded(tokenizer: dict[str, Any]) -> str | None:
    """What in ``tokenizer`` (tokenizer.json) is not known to be bounded, if anything is."""
    normalizers = steps(tokenizer.get("normalizer"), "normalizers")
    pre_tokenizers = steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if len(normalizers) + len(pre_tokenizers) > _MOST_STEPS:
        return f"{len(normalizers) + len(pre_tokenizers)} steps"
    kinds = [step.get("type") for step in (*normalizers, *pre_tokenizers)]
    if sum(kind in _GROWING for kind in kinds) > _MOST_GROWING or kinds.count("ByteLevel") > 1:
        return "steps that make a text longer, one after another"
    for step in normalizers:
        kind = step.get("type")
        if kind == "Prepend" and len(str(step.get("prepend"))) == 1:
            continue
        pattern = step.get("pattern")
        if kind == "Replace" and isinstance(pattern, dict) and _literal(pattern):
            if len(str(step.get("content"))) <= len(str(pattern["String"])):
                continue
        elif kind in _NORMALIZERS:
            continue
        return f"normalizer {kind}"
    for step in pre_tokenizers:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Split" and isinstance(pattern, dict):
            if _literal(pattern) or pattern.get("Regex") in REGEXES:
                continue
            return f"pre_tokenizer Split by {str(pattern.get('Regex'))[:100]!r}"
        if kind not in _PRE_TOKENIZERS and kind not in ("ByteLevel", "Metaspace"):
            return f"pre_tokenizer {kind}"
    return None


def _literal(pattern: dict[str, Any]) -> bool:
    return bool(pattern.get("String"))
