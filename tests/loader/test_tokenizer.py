"""Tokenizers: equal to the recorded ones, exact in bytes, and to the letter of the metadata."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import (
    ARRAY,
    BOOL,
    BYTE,
    CONTROL,
    FLOAT32,
    INT32,
    NORMAL,
    STRING,
    UINT32,
    UNKNOWN,
    USER_DEFINED,
    Gguf,
    all_that_merges,
    byte_characters,
    tiny_gemma3,
    tiny_llama,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from octavo.loader.base import CheckpointError, Rendered, Tokenizer
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_tokenizer import gguf_tokenizer, implied_merges
from octavo.loader.pre_tokenizers import CUTS
from octavo.loader.template_text import CONTENT, TEMPLATE
from octavo.loader.tokenizer import BpeTokenizer
from paths import ORACLE

MODELS = {"smollm2": "smollm2_path", "gemma3-270m": "gemma3_path"}


def build(file: Gguf, tmp_path: Path) -> Tokenizer:
    read = GgufFile(file.write(tmp_path / "model.gguf"))
    return gguf_tokenizer(read, len(file.metadata["tokenizer.ggml.tokens"][2]))


@pytest.fixture(scope="session")
def real(request: pytest.FixtureRequest) -> Callable[[str], Tokenizer]:
    built: dict[str, Tokenizer] = {}

    def tokenizer(name: str) -> Tokenizer:
        if name not in built:
            file = GgufFile(request.getfixturevalue(MODELS[name]))
            built[name] = gguf_tokenizer(file, file.tensors["token_embd.weight"].shape[0])
        return built[name]

    return tokenizer


# ── The real models ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_recorded_tokenizer(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real(name)
    cases = json.loads((ORACLE / f"{name}.tokenizer.json").read_text())["cases"]
    assert len(cases) >= 500
    for case in cases:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
        decoded = case.get("decoded", case["text"])
        assert tokenizer.decode(ids, skip_special_tokens=False) == decoded
        assert tokenizer.decode(ids) == case.get("decoded_without_special", decoded)


def test_bos_where_the_model_wants_it(real: Callable[[str], Tokenizer]) -> None:
    assert real("smollm2").encode("") == []
    assert real("smollm2").encode("Hello world") == [19556, 905]
    assert real("gemma3-270m").encode("") == [2]
    assert real("gemma3-270m").encode("Hello world") == [2, 9259, 1902]
    assert real("gemma3-270m").encode("Hello world", add_special_tokens=False) == [9259, 1902]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=200)
@given(data=st.data())
def test_tokens_are_the_bytes_of_the_text(
    name: str, real: Callable[[str], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = real(name)
    # Control characters are no tokens of SmolLM2; ▁ is Gemma's space.
    text = data.draw(st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn"))))
    text = text.replace("▁", " ")
    ids = tokenizer.encode(text, add_special_tokens=False)
    # A text may spell a special token, which stands for no bytes.
    spelled = [
        tokenizer.token_text(token_id).encode()
        if tokenizer.is_special(token_id)
        else tokenizer.token_bytes(token_id)
        for token_id in ids
    ]
    assert b"".join(spelled) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert joined.decode(errors="replace") == tokenizer.decode(ids)


@pytest.mark.parametrize("name", MODELS)
def test_a_special_token_inside_a_text(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real(name)
    special = {"smollm2": "<|im_end|>", "gemma3-270m": "<end_of_turn>"}[name]
    ids = tokenizer.encode(f"a{special}b", add_special_tokens=False)
    assert [tokenizer.is_special(token_id) for token_id in ids] == [False, True, False]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{special}b"


@pytest.mark.parametrize("name", MODELS)
def test_every_token_has_bytes_and_text(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real(name)
    for token_id in range(tokenizer.vocab_size):
        data, text = tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)
        if tokenizer.is_special(token_id):
            assert data == b""
            assert text
        else:
            assert data
            assert text == data.decode(errors="replace")


def test_a_megabyte_without_a_break(real: Callable[[str], Tokenizer]) -> None:
    for name in MODELS:
        assert real(name).decode(real(name).encode("a" * 1_000_000)) == "a" * 1_000_000


# ── Byte-level vocabularies ─────────────────────────────────────────────────────────────────────


def test_byte_level(tmp_path: Path) -> None:
    tokenizer = build(tiny_llama(), tmp_path)
    tokens = tiny_llama().metadata["tokenizer.ggml.tokens"][2]
    ids = tokenizer.encode("hello<tool><|im_end|>é")
    assert [tokens[i] for i in ids] == ["hello", "<tool>", "<|im_end|>", "Ã", "©"]
    assert [tokenizer.token_bytes(i) for i in ids] == [b"hello", b"<tool>", b"", b"\xc3", b"\xa9"]
    assert [tokenizer.is_special(i) for i in ids] == [False, False, True, False, False]
    assert tokenizer.decode(ids) == "hello<tool>é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<tool><|im_end|>é"
    assert tokenizer.decode(ids[:-1]) == "hello<tool>\ufffd"
    assert tokenizer.token_text(ids[2]) == "<|im_end|>"
    assert tokenizer.token_text(ids[3]) == "\ufffd"
    assert tokenizer.bos_token_id == tokens.index("<s>")


def test_added_tokens_outside_the_byte_alphabet(tmp_path: Path) -> None:
    file = tiny_llama()
    _, _, tokens = file.metadata["tokenizer.ggml.tokens"]
    tokens[-2:] = ["<｜end▁｜>", "<Ġ ｜>"]
    tokenizer = build(file, tmp_path)
    ids = tokenizer.encode("h<｜end▁｜><Ġ ｜>", add_special_tokens=False)
    assert ids == [tokens.index("h"), len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.token_bytes(ids[2]) == "<Ġ ｜>".encode()
    assert tokenizer.token_text(ids[1]) == "<｜end▁｜>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 123  4\n\nx", ["it", "'s", " 123", " ", " 4", "\n", "\n", "x"]),
        ("default", "a  b", ["a", " ", " b"]),
        ("smollm", "it's 123  4\n\n5", ["it", "'s", " ", *"123", "  ", "4", "\n\n", "5"]),
        ("llama-bpe", "IT'S 1234 a\n\n b", ["IT", "'S", " ", "123", "4", " a", "\n\n", " b"]),
        ("qwen2", "it's 12 a\n\n b", ["it", "'s", " ", "1", "2", " a", "\n\n", " b"]),
        ("tekken", "fooBar 12 /x\n", ["foo", "Bar", " ", "1", "2", " /", "x", "\n"]),
    ],
)
def test_kinds_of_pre_tokenization(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    """Seen through a vocabulary in which everything but a cut merges."""
    spelled = dict(zip((bytes([b]) for b in range(256)), byte_characters(), strict=True))
    whole = "".join(spelled[text.encode()[i : i + 1]] for i in range(len(text.encode())))
    merged, merges = all_that_merges(whole)
    tokens = byte_characters() + merged
    file = tiny_llama().set("tokenizer.ggml.pre", STRING, pre)
    file.set("tokenizer.ggml.tokens", ARRAY, STRING, tokens)
    file.set("tokenizer.ggml.token_type", ARRAY, INT32, [NORMAL] * len(tokens))
    file.set("tokenizer.ggml.merges", ARRAY, STRING, merges)
    file.drop("tokenizer.ggml.bos_token_id").drop("tokenizer.ggml.eos_token_id")
    tokenizer = build(file, tmp_path)
    ids = tokenizer.encode(text)
    assert [tokenizer.token_text(i) for i in ids] == pieces


def test_whole_words_of_llama3(tmp_path: Path) -> None:
    """A word in the vocabulary that no merge reaches is taken whole, and BOS is the default."""
    file = tiny_llama().set("tokenizer.ggml.merges", ARRAY, STRING, ["h e"])
    tokens = file.metadata["tokenizer.ggml.tokens"][2]
    assert len(build(file, tmp_path).encode("hello")) == 4
    file.set("tokenizer.ggml.pre", STRING, "llama-bpe")
    assert build(file, tmp_path).encode("hello") == [tokens.index("<s>"), tokens.index("hello")]
    file.set("tokenizer.ggml.add_bos_token", BOOL, False)
    assert build(file, tmp_path).encode("hello") == [tokens.index("hello")]


def test_eos_is_appended_when_the_file_says_so(tmp_path: Path) -> None:
    file = tiny_llama().set("tokenizer.ggml.add_eos_token", BOOL, True)
    tokenizer = build(file, tmp_path)
    (eos,) = tokenizer.eos_token_ids
    assert tokenizer.encode("h")[-1] == eos
    assert eos not in tokenizer.encode("h", add_special_tokens=False)


def test_stop_tokens_are_resolved_once(tmp_path: Path) -> None:
    file = tiny_llama()
    tokens = file.metadata["tokenizer.ggml.tokens"][2]
    file.drop("tokenizer.ggml.eos_token_id")
    assert build(file, tmp_path).eos_token_ids == {tokens.index("<|im_end|>")}  # by its name
    file.set("tokenizer.ggml.eos_token_id", UINT32, 5)
    file.set("tokenizer.ggml.eot_token_id", UINT32, 6).set("tokenizer.ggml.eom_token_id", UINT32, 7)
    assert build(file, tmp_path).eos_token_ids == {5, 6, 7, tokens.index("<|im_end|>")}
    tokens[tokens.index("<|im_end|>")] = "<other>"
    assert build(file, tmp_path).eos_token_ids == {5, 6, 7}


def test_ordinary_tokens_never_end_a_turn(tmp_path: Path) -> None:
    file = tiny_llama()
    tokens, types = (file.metadata[f"tokenizer.ggml.{k}"][2] for k in ("tokens", "token_type"))
    file.set("tokenizer.ggml.eos_token_id", UINT32, 5)
    types[tokens.index("<|im_end|>")] = NORMAL
    assert build(file, tmp_path).eos_token_ids == {5}


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    tokenizer = build(tiny_llama(), tmp_path)
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, 263, 1 << 40])
def test_ids_outside_the_vocabulary(tmp_path: Path, token_id: int) -> None:
    tokenizer = build(tiny_llama(), tmp_path)
    for call in (tokenizer.token_bytes, tokenizer.token_text, lambda i: tokenizer.decode([i])):
        with pytest.raises(IndexError, match=f"token id {token_id} is outside"):
            call(token_id)


# ── SentencePiece-style vocabularies ────────────────────────────────────────────────────────────


def test_gemma(tmp_path: Path) -> None:
    tokenizer = build(tiny_gemma3(), tmp_path)
    ids = tokenizer.encode("abc the\n   é<end_of_turn>")
    assert [tokenizer.token_text(i) for i in ids] == [
        *("<bos>", "abc", " the", "\n", "   ", "\ufffd", "\ufffd", "<end_of_turn>")
    ]
    assert tokenizer.decode(ids) == "abc the\n   é"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "abc the\n   é".encode()
    assert tokenizer.eos_token_ids == {1, 4}


def llama2(pieces: list[str], **scores: float) -> Gguf:
    file = tiny_gemma3().set("general.architecture", STRING, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    file.set("tokenizer.ggml.tokens", ARRAY, STRING, tokens)
    file.set("tokenizer.ggml.token_type", ARRAY, INT32, types)
    file.set(
        *("tokenizer.ggml.scores", ARRAY, FLOAT32),
        [scores.get(token, -float(i)) for i, token in enumerate(tokens)],
    )
    file.set("tokenizer.ggml.bos_token_id", UINT32, 1).set("tokenizer.ggml.eos_token_id", UINT32, 2)
    file.set("tokenizer.ggml.unknown_token_id", UINT32, 0)
    return file.drop("tokenizer.ggml.add_space_prefix")


def test_llama2_puts_a_space_first(tmp_path: Path) -> None:
    file = llama2(["▁", "a", "b", "▁a", "ab", "▁ab"])
    tokenizer = build(file, tmp_path)

    def texts(text: str) -> list[str]:
        return [tokenizer.token_text(i) for i in tokenizer.encode(text)]

    assert texts("ab a") == ["<s>", " ab", " a"]
    assert texts("<s>ab") == ["<s>", "<s>", " ab"]  # and behind a special token, as llama.cpp does
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"
    assert texts(" ab") == ["<s>", " ", " ab"]  # also to a space, as SentencePiece does
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("ab"))) == b" ab"
    assert tokenizer.is_special(0)
    file.set("tokenizer.ggml.add_space_prefix", BOOL, False)
    tokenizer = build(file, tmp_path)
    assert texts("ab a") == ["<s>", "ab", " a"]


def test_scores_rank_the_merges(tmp_path: Path) -> None:
    pieces = ["▁", "a", "b", "c", "ab", "bc"]
    for scores, cut in (({"ab": 5.0}, ["ab", "c"]), ({"bc": 5.0}, ["a", "bc"])):
        file = llama2(pieces, **scores).set("tokenizer.ggml.add_space_prefix", BOOL, False)
        tokenizer = build(file, tmp_path)
        ids = tokenizer.encode("abc", add_special_tokens=False)
        assert [tokenizer.token_text(i) for i in ids] == cut


@pytest.mark.parametrize(
    ("make", "control", "other"),
    [(tiny_llama, "<|im_end|>", "<tool>"), (lambda: llama2(["▁", "a"]), "</s>", "a")],
)
def test_content_of_a_chat_is_text(
    make: Callable[[], Gguf], control: str, other: str, tmp_path: Path
) -> None:
    tokenizer = build(make(), tmp_path)
    text = f"a{control}{other}"
    for origin, own in ((CONTENT, 0), (TEMPLATE, 1)):
        rendered = Rendered(text, origin * len(text), text)
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        assert sum(map(tokenizer.is_special, ids)) == own
        assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == text
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_phi3_tokens_take_white_space_along(tmp_path: Path) -> None:
    file = llama2(["▁", "a", "<|user|>", "<t>", "\n"])
    types = file.metadata["tokenizer.ggml.token_type"][2]
    types[-3] = CONTROL
    assert len(build(file, tmp_path).encode("<|user|>\n a", add_special_tokens=False)) > 2
    file.set("general.architecture", STRING, "phi3")
    tokenizer = build(file, tmp_path)
    ids = tokenizer.encode("<|user|>\n a", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == "<|user|>a"


def test_user_defined_tokens_keep_a_written_space_mark(tmp_path: Path) -> None:
    file = llama2(["▁", "a", "<▁x>"])
    file.metadata["tokenizer.ggml.token_type"][2][-1] = USER_DEFINED
    tokenizer = build(file, tmp_path)
    (token_id,) = tokenizer.encode("<▁x>", add_special_tokens=False)
    assert tokenizer.token_bytes(token_id) == "<▁x>".encode()


def every_cut(tokens: list[str], ranks: list[int]) -> list[tuple[str, str]]:
    """All pairs that spell a token, best first; among equals, longer left, then right parts."""
    pairs = [
        (rank, -cut, cut - len(token), index, token)
        for index, (token, rank) in enumerate(zip(tokens, ranks, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    return [(token[:-left], token[-left:]) for _, left, _, _, token in sorted(pairs)]


@settings(max_examples=500)
@given(
    pieces=st.sets(st.text("ab▁", min_size=1, max_size=7), min_size=1, max_size=40),
    ranked=st.randoms(use_true_random=False),
    ties=st.booleans(),
    texts=st.lists(st.text("ab▁", max_size=40), min_size=1, max_size=20),
)
def test_one_cut_a_token_is_all_that_can_happen(
    pieces: set[str], ranked: object, ties: bool, texts: list[str]
) -> None:
    tokens = sorted(pieces)
    ranked.shuffle(tokens)  # type: ignore[attr-defined]
    ranks = [ranked.randrange(4) if ties else i for i in range(len(tokens))]  # type: ignore[attr-defined]
    pruned = implied_merges(tokens, np.array(ranks, np.int32), np.ones(len(tokens), np.bool_))
    vocab = {token: index for index, token in enumerate(tokens)}
    full = Backend(models.BPE(vocab, every_cut(tokens, ranks)))
    fast = Backend(models.BPE(vocab, pruned))
    assert len(pruned) <= len(tokens)
    for text in texts:
        assert fast.encode(text).ids == full.encode(text).ids


def test_merge_cuts_checks_its_arguments() -> None:
    from octavo import _native

    text, flags = np.zeros(4, np.uint32), np.ones(2, np.uint8)
    ranks = np.zeros(2, np.int32)
    for offsets in ([0, 2], [0, 5, 4], [1, 2, 4], [0, 2, 3], [0, 2, 9]):
        with pytest.raises(ValueError, match="same tokens"):
            _native.merge_cuts(text, np.array(offsets), ranks, flags)


# ── What is refused ─────────────────────────────────────────────────────────────────────────────

Change = Callable[[Gguf], object]


def size(file: Gguf) -> int:
    return len(file.metadata["tokenizer.ggml.tokens"][2])


REFUSED: dict[str, tuple[Callable[[], Gguf], Change, str]] = {
    "no tokens": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.tokens", ARRAY, UINT32, [1] * 263),
        "tokens is not an array of strings",
    ),
    "model": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.model", STRING, "bert"),
        "tokenizer.ggml.model 'bert' is not supported; supported are gpt2, llama",
    ),
    "pre": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.pre", STRING, "kimi-k2"),
        f"tokenizer.ggml.pre 'kimi-k2' is not supported; supported are {', '.join(CUTS)}",
    ),
    "no merges": (tiny_llama, lambda f: f.drop("tokenizer.ggml.merges"), "merges is missing"),
    "merge of no token": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.merges", ARRAY, STRING, ["q zz"]),
        "merges does not fit the tokens",
    ),
    "merge without a space": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.merges", ARRAY, STRING, ["qz"]),
        "merges does not fit the tokens",
    ),
    "token twice": (
        tiny_llama,
        lambda f: f.metadata["tokenizer.ggml.tokens"][2].__setitem__(3, "!"),
        "tokens holds '!' twice",
    ),
    "token not UTF-8": (
        tiny_llama,
        lambda f: f.metadata["tokenizer.ggml.tokens"][2].__setitem__(3, b"\xff"),
        "tokens holds a string that is not UTF-8",
    ),
    "type that is a float": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.token_type", ARRAY, FLOAT32, [1.0] * 263),
        "token_type is an array of float32, not of an integer a token",
    ),
    "type that there is not": (
        tiny_llama,
        lambda f: f.metadata["tokenizer.ggml.token_type"][2].__setitem__(7, 9),
        "token_type is 9 for token 7, not from 1 to 6",
    ),
    "type of zero": (
        tiny_llama,
        lambda f: f.metadata["tokenizer.ggml.token_type"][2].__setitem__(0, 0),
        "token_type is 0 for token 0",
    ),
    "types that are bools": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.token_type", ARRAY, BOOL, [True] * 263),
        "token_type is an array of bool",
    ),
    "scores that are integers": (
        lambda: llama2(["a"]),
        lambda f: f.set("tokenizer.ggml.scores", ARRAY, INT32, [0] * size(f)),
        "scores is an array of int32, not of a float a token",
    ),
    "scores that are no numbers": (
        lambda: llama2(["a"]),
        lambda f: f.metadata["tokenizer.ggml.scores"][2].__setitem__(3, float("nan")),
        "scores is nan for token 3",
    ),
    "infinite scores, of a vocabulary that does not use them": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.scores", ARRAY, FLOAT32, [float("inf")] * 263),
        "scores is inf for token 0",
    ),
    "scores of fewer": (
        lambda: llama2(["a"]),
        lambda f: f.set("tokenizer.ggml.scores", ARRAY, FLOAT32, [0.0]),
        "scores has 1 entries for",
    ),
    "add_bos as a number": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.add_bos_token", UINT32, 1),
        "add_bos_token is a int, not a bool",
    ),
    "eos as a text": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.eos_token_id", STRING, "</s>"),
        "eos_token_id is a str, not a int",
    ),
    "merges as numbers": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.merges", ARRAY, UINT32, [1]),
        "merges is not an array of strings",
    ),
    "types": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.token_type", ARRAY, INT32, [1]),
        "token_type has 1 entries for 263 tokens",
    ),
    "bos": (
        tiny_llama,
        lambda f: f.set("tokenizer.ggml.bos_token_id", UINT32, 263),
        "bos_token_id is 263, outside the vocabulary of 263",
    ),
    "no scores": (
        lambda: llama2(["a"]),
        lambda f: f.drop("tokenizer.ggml.scores"),
        "scores is missing",
    ),
    "long token": (
        lambda: llama2(["a" * 513]),
        lambda f: f,
        "holds a token of 513 characters, more than 512",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    make, change, reason = REFUSED[name]
    file = make()
    change(file)
    with pytest.raises(CheckpointError) as caught:
        build(file, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "model.gguf"))
    assert reason in str(caught.value)


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    read = GgufFile(tiny_llama().write(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match="has 263 tokens for a vocabulary of 264"):
        gguf_tokenizer(read, 264)


# --- llama.cpp's vectors --------------------------------------------------------------------------

RECORDED = json.loads((ORACLE / "llama_cpp_vectors.json").read_text())
VOCABULARIES = RECORDED["vocabularies"]


def vocabulary(
    pre: str, tokens: list[str], merges: list[str], path: Path, added: Sequence[int] = ()
) -> BpeTokenizer:
    made = [merge.replace(" ", "") for merge in merges]
    tokens = list(dict.fromkeys([*tokens, *made, *byte_characters()]))
    file = tiny_llama().set("tokenizer.ggml.pre", STRING, pre)
    file.set("tokenizer.ggml.tokens", ARRAY, STRING, tokens)
    types = [USER_DEFINED if i in added else NORMAL for i in range(len(tokens))]
    file.set("tokenizer.ggml.token_type", ARRAY, INT32, types)
    file.set("tokenizer.ggml.merges", ARRAY, STRING, merges)
    file.drop("tokenizer.ggml.bos_token_id").drop("tokenizer.ggml.eos_token_id")
    return gguf_tokenizer(GgufFile(file.write(path / "model.gguf")), len(tokens))


@pytest.mark.parametrize("name", VOCABULARIES)
def test_equals_the_published_vectors(name: str, tmp_path: Path) -> None:
    recorded = VOCABULARIES[name]
    pre, tokens, merges, added = (recorded[key] for key in ("pre", "tokens", "merges", "added"))
    tokenizer = vocabulary(pre, tokens, merges, tmp_path, added)
    assert len(recorded["cases"]) >= 46
    for number, ids in zip(recorded["texts"], recorded["cases"], strict=True):
        text = RECORDED["texts"][number]
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("pre", CUTS)
def test_every_name_cuts_and_loses_nothing(pre: str, tmp_path: Path) -> None:
    tokenizer = vocabulary(pre, [], [], tmp_path)
    for text in RECORDED["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # As the expressions of the models' own files say it.
        ("gpt-4o", "HelloWorld's 1234 a/\n", ["Hello", "World's", " ", "123", "4", " a", "/\n"]),
        ("llama4", "it's  x", ["it's", " ", " x"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("dbrx", "it's 12345", ["it", "'s", " ", "123", "45"]),
        ("refact", "a1 b 23", ["a", "1", " b", " ", "2", "3"]),
        ("smaug-bpe", "x 1234", ["x", " ", "123", "4"]),
        ("deepseek-llm", "ab 12\n  ", ["ab", " ", "12", "\n", "  "]),
        ("exaone", "a12", ["a", "1", "2"]),
        ("olmo", "a12 3", ["a", "12", " 3"]),
        ("default", "a12345, b", ["a", "123", "45", ",", " b"]),
        ("superbpe", "12345 a b", ["12", "345", " a b"]),
    ],
)  # fmt: skip
def test_where_texts_are_cut(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    """Seen through a vocabulary in which everything within a piece merges."""
    spelled = dict(zip(range(256), byte_characters(), strict=True))
    whole = "".join(spelled[byte] for byte in text.encode())
    tokens, merges = all_that_merges(whole)
    tokenizer = vocabulary(pre, tokens, merges, tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == pieces
