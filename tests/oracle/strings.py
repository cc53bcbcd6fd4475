"""Varied strings that try to break a tokenizer, the same ones for the same seed.

Used by ``record.py`` (a few hundred, recorded with their ids) and by
``benchmarks/tokenizer_check.py`` (ten thousand and more, compared live).
"""

import random
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

TEXTS = Path(__file__).resolve().parent / "texts"

# (first, last) code points of the blocks drawn from; unassigned ones and surrogates are skipped.
BLOCKS: dict[str, tuple[int, int]] = {
    "ascii": (0x20, 0x7E),
    "latin1": (0xA0, 0xFF),
    "latin_extended": (0x100, 0x24F),
    "ipa": (0x250, 0x2AF),
    "combining": (0x300, 0x36F),
    "greek": (0x370, 0x3FF),
    "cyrillic": (0x400, 0x52F),
    "armenian": (0x530, 0x58F),
    "hebrew": (0x590, 0x5FF),
    "arabic": (0x600, 0x6FF),
    "syriac": (0x700, 0x74F),
    "devanagari": (0x900, 0x97F),
    "bengali": (0x980, 0x9FF),
    "tamil": (0xB80, 0xBFF),
    "thai": (0xE00, 0xE7F),
    "tibetan": (0xF00, 0xFFF),
    "georgian": (0x10A0, 0x10FF),
    "hangul_jamo": (0x1100, 0x11FF),
    "ethiopic": (0x1200, 0x137F),
    "cherokee": (0x13A0, 0x13FF),
    "khmer": (0x1780, 0x17FF),
    "mongolian": (0x1800, 0x18AF),
    "latin_additional": (0x1E00, 0x1EFF),
    "greek_extended": (0x1F00, 0x1FFF),
    "punctuation": (0x2000, 0x206F),
    "super_subscripts": (0x2070, 0x209F),
    "currency": (0x20A0, 0x20CF),
    "letterlike": (0x2100, 0x214F),
    "number_forms": (0x2150, 0x218F),
    "arrows": (0x2190, 0x21FF),
    "mathematical": (0x2200, 0x22FF),
    "enclosed": (0x2460, 0x24FF),
    "box_drawing": (0x2500, 0x257F),
    "dingbats": (0x2700, 0x27BF),
    "braille": (0x2800, 0x28FF),
    "cjk_symbols": (0x3000, 0x303F),
    "hiragana": (0x3040, 0x309F),
    "katakana": (0x30A0, 0x30FF),
    "cjk": (0x4E00, 0x9FFF),
    "yi": (0xA000, 0xA48F),
    "hangul": (0xAC00, 0xD7A3),
    "private_use": (0xE000, 0xE0FF),
    "cjk_compatibility": (0xF900, 0xFAFF),
    "presentation_forms": (0xFB00, 0xFDFF),
    "variation_selectors": (0xFE00, 0xFE0F),
    "full_width": (0xFF00, 0xFFEF),
    "gothic": (0x10330, 0x1034F),
    "cuneiform": (0x12000, 0x123FF),
    "hieroglyphs": (0x13000, 0x1342F),
    "math_alphanumeric": (0x1D400, 0x1D7FF),
    "mahjong": (0x1F000, 0x1F02F),
    "emoji": (0x1F300, 0x1F64F),
    "transport": (0x1F680, 0x1F6FF),
    "supplemental_emoji": (0x1F900, 0x1F9FF),
    "cjk_b": (0x20000, 0x202FF),
    "tags": (0xE0000, 0xE007F),
}

WHITE_SPACE = [
    " ", "  ", "   ", "    ", "        ", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\t", "\t\t", " \n",
    "\n ", "\n    ", "\u00a0", "\u2003", "\u200b", "\u3000", "\ufeff", "\u2028", "\x0b", "\x0c",
    "\x85", " " * 16, " " * 31, "\n" * 9, "\t" * 7,
]  # fmt: skip

EMOJI = [
    "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "🇯🇵🇩🇪", "❤️", "☕", "🐈‍⬛", "1️⃣", "🧑🏿‍💻", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "🤷‍♀️",
    "⌚︎", "✈️",
]  # fmt: skip

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<jupyter_code>",
    "<bos>", "<eos>", "<pad>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<unused0>",
    "<unused17>", "[multimodal]", "<start_of_image>", "<table>", "</table>", "<h1>", "<b>", "</i>",
    "<0x0A>", "<0xFF>", "<s>", "</s>", "[INST]", "<|eot_id|>", "<|im_start", "im_end|>",
    "<|IM_END|>", "< |im_end|>", "<start_of_turn>user\n", "<|im_start|>system\n", "▁", "▁▁", "Ġ",
    "Ċ", "<|im_start|><|im_end|>",
]  # fmt: skip

_WORDS = (
    "the of and to in is that for it was on with as at by from they have this are not but what all "
    "were when we there can an your which their said if do will each about how up out them then "
    "she many some so these would other into has more her two like him see time could no make than "
    "first been its who now people my made over did down only way find use may water long little "
    "very after words called just where most know Internationalisation antidisestablishment "
    "don't I'll we've they're it's o'clock DON'T I'LL 'tis rock'n'roll naïve café Zürich coöperate "
    "e.g. U.S.A. Mr. PhD iPhone GitHub README foo_bar fooBar XMLHttpRequest __init__ x86_64 utf-8 "
    "https://example.org/a?b=c&d=%20e#f user@example.org C:\\Users\\x ~/bin $HOME #tag @name"
)
WORDS = _WORDS.split()

CODE = [
    "def f(x, *args, **kw):\n    return {k: v for k, v in kw.items() if v is not None}\n",
    "for (int i = 0; i < n; ++i) { a[i] = b[i] * 3.5e-2f; }",
    "SELECT * FROM t WHERE a <> 'b''c' AND d >= 10;",
    '{"a": [1, 2.5, -3e10, null, true], "b": "\\u00e9\\n"}',
    '<div class="x"><p>Hi &amp; bye</p><!-- c --></div>',
    'if [[ -f $x ]]; then echo "${x%.*}"; fi',
    "let f = |x: &mut Vec<u8>| -> Option<usize> { x.iter().position(|&b| b == b'\\n') };",
    "\\frac{\\partial f}{\\partial x} = \\sum_{i=0}^{n} \\alpha_i x^{i}",
    "| a | b |\n|---|--:|\n| 1 | 22 |\n",
    "diff --git a/x b/x\n@@ -1,2 +1,2 @@\n-\told\n+\tnew\n",
    "\tif (a) {\n\t\tb();\n\t}\n",
    "    1    22   333\n  4.50  -6,7\n",
    "a\n\n1. one\n2. two\n\n  3) three",
    "0x7fffffff 1_000_000 1,234.56 3.14159265358979 12:34:56 2026-11-29T17:08:52Z +49 30 123456",
    "// TODO(x): ???\n/* *** */ #!/usr/bin/env python3",
    'a+b-c*d/e%f^g&h|i~j!k=l<m>n?o:p;q,r.s\'(t)[u]{v}"w"`x`\\y@z',
]


def assigned(block: str) -> list[str]:
    """The characters of a block that Unicode assigns (by Python's own tables)."""
    first, last = BLOCKS[block]
    characters = (chr(c) for c in range(first, last + 1))
    return [c for c in characters if unicodedata.category(c) not in ("Cn", "Cs")]


def fixed() -> list[str]:
    """The cases worth keeping whatever the seed: edge cases by hand, then one for each block."""
    base = "The quick brown fox jumps over the lazy dog."
    cases = [
        "", " ", "  ", "\n", "\n\n", "\t", "a", " a", "a ", " a ", "  a", "a  b", "a\n\nb", "\x00",
        "a\x00b", "\x01\x02\x1b[0m\x7f", "\ufeffBOM", "\ufffd", "\U0010fffd", base, " " + base,
        base + " ", base * 3, base.upper(), base.replace(" ", ""), "é", "e\u0301", "Å", "A\u030a",
        "\u1e9b\u0323", "ﬁ ligature", "½ ¼ ²³ ① Ⅷ ٣ ३ 三", "x²+y²", "1", "12", "123", "1234", " 1",
        "  1", "   12", "\n1", "\n\n1", "\t1", "a1b2c3", "v1.2.3", "1st 2nd 3rd", "²", " ½", "  ½",
        " ①", "'s 't 're 've 'm 'll 'd", "'S 'T 'RE", "it's", "IT'S", "it’s", "''", "\"\"", "...",
        "!!!???", "-----", "====", "a_b__c___d", "🙂" * 20, "a" * 300, "ab" * 150, " " * 100,
        "\n" * 50, " \n" * 20, "\r\n\r\n", "é" * 100, "的" * 64, "\u0301" * 8, "\u200d",
        "\u200b\u200b",
        "ᄀᄀᄀ", "각", "각", "が", "が", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界！",
        "مرحبا بالعالم", "Привет, мир!", "Γειά σου Κόσμε", "こんにちは世界", "안녕하세요 세계",
        "שלום עולם", "Xin chào thế giới", "Gıda İstanbul ığdır", "ǅ ß ẞ ſ",
    ]  # fmt: skip
    cases += WHITE_SPACE + EMOJI + SPECIAL + CODE
    cases += [f"a{s}b" for s in WHITE_SPACE] + [f"x {s} y" for s in SPECIAL]
    cases += [f"1{s}2" for s in WHITE_SPACE] + [s + s for s in SPECIAL[:20]]
    for block in BLOCKS:
        characters = assigned(block)
        step = max(1, len(characters) // 12)
        cases.append("".join(characters[::step][:12]))
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        cases.append(unicodedata.normalize(form, "Ångström café Việt ﬃ ① ㎏ 한글 が"))
    return cases


def _text_pieces(rng: random.Random, pool: str) -> str:
    start = rng.randrange(len(pool))
    return pool[start : start + rng.randint(1, 200)]


def generate(count: int, seed: int) -> Iterator[str]:
    """``count`` strings: the fixed ones, then random ones. No lone surrogates, so all are UTF-8."""
    rng = random.Random(seed)
    pool = "\n".join(p.read_text(encoding="utf-8") for p in sorted(TEXTS.glob("*.txt")))
    blocks = {name: assigned(name) for name in BLOCKS}
    names = sorted(blocks)

    def script() -> str:
        characters = blocks[rng.choice(names)]
        words = (
            "".join(rng.choices(characters, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 9))
        )
        return rng.choice(["", " ", " ", "\n"]).join(words)

    def words() -> str:
        out = ""
        for _ in range(rng.randint(1, 25)):
            out += rng.choice(WORDS)
            out += rng.choice([" ", " ", " ", " ", ", ", ". ", "  ", "\n", "-", "—", "! ", " ("])
        return out

    def code() -> str:
        snippet = "".join(rng.choices(CODE, k=rng.randint(1, 3)))
        start = rng.randrange(len(snippet))
        return snippet[start : start + rng.randint(1, 160)]

    def numbers() -> str:
        out = ""
        for _ in range(rng.randint(1, 12)):
            value = rng.choice([rng.randrange(10), rng.randrange(10**6), rng.random() * 1000])
            out += rng.choice([" ", "  ", "    ", "\n", "\n\n", "\t", ",", "", "$", "-"])
            out += str(value) if rng.random() < 0.9 else "".join(rng.choices("²½①٣३Ⅷ", k=2))
        return out

    def spaces() -> str:
        out = ""
        for _ in range(rng.randint(1, 8)):
            out += rng.choice(WHITE_SPACE) * rng.randint(1, 4)
            out += rng.choice(["", "", "x", "1", "é", "的", ".", "if", "<b>"])
        return out

    def emoji() -> str:
        return "".join(
            rng.choice([*EMOJI, " ", "a", "\u200d", "\ufe0f"]) for _ in range(rng.randint(1, 12))
        )

    def special() -> str:
        return "".join(
            rng.choice(["", " ", "\n", "a", "  "]) + rng.choice(SPECIAL)
            for _ in range(rng.randint(1, 6))
        )

    def controls() -> str:
        return "".join(
            chr(rng.choice([rng.randrange(32), rng.randrange(0x7F, 0xA0), 0x41])) for _ in range(8)
        )

    def anything() -> str:
        out = ""
        while len(out) < 12:
            c = rng.randrange(0x110000)
            if not 0xD800 <= c <= 0xDFFF:
                out += chr(c)
        return out

    def normalised() -> str:
        form = rng.choice(["NFC", "NFD", "NFKC", "NFKD"])
        return unicodedata.normalize(form, _text_pieces(rng, pool))

    def mixture() -> str:
        return "".join(rng.choice(simple)() for _ in range(rng.randint(2, 4)))

    def cased() -> str:
        return rng.choice([str.upper, str.title, str.swapcase])(_text_pieces(rng, pool))

    simple: list[Callable[[], str]] = [
        script, words, code, numbers, spaces, emoji, special, controls, anything,
        lambda: _text_pieces(rng, pool),
    ]  # fmt: skip
    kinds = [*simple, normalised, cased, mixture, mixture, script, script]
    cases = fixed()
    yield from cases[:count]
    for index in range(max(0, count - len(cases))):
        yield kinds[index % len(kinds)]()
