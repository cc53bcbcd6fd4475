"""How byte-level vocabularies cut texts before merging, by the names that GGUF files use.

The names and what they stand for are llama.cpp's (src/llama-vocab.cpp, late 2026); the expressions
are those of the models' own tokenizer.json, where llama.cpp adapts them to its own engine. Its
published vectors try them: benchmarks/llama_cpp_vectors.py.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Cut(NamedTuple):
    """``splits`` are applied one after another: what an expression matches, and what lies between
    its matches, are pieces for the next."""

    splits: tuple[str, ...] = ()
    gpt2: bool = False  # GPT-2's own expression comes last
    whole_words: bool = False  # a piece that is in the vocabulary is taken without merging
    bos: bool = False  # BOS goes before a text unless the file says no


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
)
_QWEN2 = _LLAMA3.replace(_THREE_DIGITS, DIGIT)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _characters(regex: str) -> str:
    """With the characters that it names by number."""
    return re.sub(r"\\x\{(\w+)\}", lambda match: chr(int(match[1], 16)), regex)


def _cased(ending: str, digits: str) -> str:
    """Words cut where small letters are followed by capitals."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES
    )


_TEKKEN = _cased("", DIGIT)
_GPT4O = _cased(_CONTRACTIONS + "?", _THREE_DIGITS)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK_LETTERS = _characters(
    r"\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}"
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}"
    r"\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-"
    r"\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-"
    r"\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-"
    r"\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-"
    r"\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}"
    r"-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-"
    r"\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}"
    r"\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-"
    r"\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}"
    r"\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}"
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)
_DEEPSEEK_MARKS = _characters(
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"
)
_DEEPSEEK_HAN = _characters(r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+")
_DEEPSEEK3_HAN = _characters(r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+")
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
_YOUTU_EAST = _characters(
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}"
    r"\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+|[\x{3105}-\x{312f}]+|["
    r"\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
)
_BLOOM = _characters(r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+")
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
)
_JAIS2 = _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + "".join(
    rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")
) + r"|\s{1}"  # fmt: skip

_SEED_CODER = _LLAMA3.replace(_THREE_DIGITS, r"\p{N}{1}").replace(
    r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"
)
_SUPERBPE = r"(?=(\d{3})+(?!\d))"

# A way of cutting, and its names; the first is the one that files are written with.
_NAMES: list[tuple[Cut, str]] = [
    (
        Cut(gpt2=True),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de jina-v1-en jina-v2-es "
        "jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert exaone4",
    ),
    (
        Cut((DIGIT,), gpt2=True),
        "smollm refact starcoder command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        Cut((_LLAMA3,), whole_words=True, bos=True),
        "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (Cut((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (Cut((_LLAMA3,), whole_words=True), "glm4 glm5"),
    (
        Cut((_QWEN2,)),
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo f2llmv2 grok-2",
    ),
    (
        Cut(
            (
                _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
                    r"[^\s\p{L}", r"[^\s\p{L}\p{M}"
                ),
            )
        ),
        "qwen35",
    ),
    (Cut((_TEKKEN,), whole_words=True, bos=True), "tekken"),
    (Cut((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Cut((_GPT4O,), whole_words=True), "granite-embed-multi-97m"),
    (
        Cut(
            (
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                _DEEPSEEK_MARKS,
                r"(?<!\s)\s+$",
                _DEEPSEEK_HAN,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, DIGIT)), "deepseek-coder"),
    (
        Cut((_THREE_DIGITS, _DEEPSEEK3_HAN, _DEEPSEEK3)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (
        Cut(
            (
                _THREE_DIGITS,
                _DEEPSEEK3_HAN,
                _DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"),
                DIGIT,
            )
        ),
        "spark2_5",
    ),
    (
        Cut((_YOUTU_EAST, _cased(_CONTRACTIONS + "?", DIGIT)), whole_words=True),
        "youtu",
    ),
    (Cut((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (Cut((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (Cut((_BLOOM, DIGIT)), "viking"),
    (Cut(_CHAMELEON, gpt2=True, bos=True), "chameleon"),
    (Cut((_JAIS2,)), "jais-2"),
    (Cut((r"\p{N}+", _SUPERBPE)), "superbpe"),
    (
        Cut(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (Cut((_SEED_CODER,)), "seed-coder"),
    (Cut((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)), "ufakzeka"),
    (Cut((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
    (
        Cut(
            (
                _QWEN2.replace(r"\p{L}+", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
                .replace(r"[\r\n]*", r"[\r\n/]?")
                .replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
            )
        ),
        "exaone-moe",
    ),
    (Cut((_THREE_DIGITS, _LLAMA3.replace(_THREE_DIGITS, r"\p{N}+")), whole_words=True), "minicpm5"),
    (Cut((_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
]
CUTS: dict[str, Cut] = {name: cut for cut, names in _NAMES for name in names.split()}
# They take time in proportion to a text, whatever it is; folders have them, too. SuperBPE's second
# one takes the square of a number's digits. (DeepSeek's, of white space at the end, looks behind
# where the model's own does not: that takes the square of a run's length.)
REGEXES = frozenset(regex for cut in CUTS.values() for regex in cut.splits) - {_SUPERBPE}
