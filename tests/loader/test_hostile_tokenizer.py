"""A tokenizer.json costs those who use it bounded time and memory, and never the process."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from octavo.loader import hf_special_tokens
from octavo.loader.base import CheckpointError, TokenizerError
from octavo.loader.encoder import Encoder
from octavo.loader.hf_folder import HfFolder
from octavo.loader.hf_tokenizer import hf_tokenizer
from octavo.loader.pipeline_cost import unbounded
from octavo.loader.pre_tokenizers import CUTS
from octavo.loader.tokenizer import BpeTokenizer, EncoderApart
from paths import ORACLE
from patience import PATIENCE

RECORDED = ORACLE / "tokenizers"
Change = Callable[[dict[str, Any]], object]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


def load(path: Path, change: Change, kind: str = "qwen2") -> BpeTokenizer:
    shutil.copytree(RECORDED / kind, path, dirs_exist_ok=True)
    values = json.loads((path / "tokenizer.json").read_text())
    change(values)
    (path / "tokenizer.json").write_text(json.dumps(values))
    return hf_tokenizer(HfFolder(path), 4096)


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizers(*steps: dict[str, Any]) -> Change:
    return lambda v: v.update(normalizer={"type": "Sequence", "normalizers": list(steps)})


def pre_tokenizers(*steps: dict[str, Any]) -> Change:
    whole = {"type": "Sequence", "pretokenizers": [*steps, BYTES]}
    return lambda v: v.update(pre_tokenizer=whole)


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


HOSTILE: dict[str, tuple[Change, str]] = {
    "growth": (normalizers(*[replace("!", "!" * 1000)] * 3), "!"),
    "doubling": (normalizers(*[replace("!", "!!")] * 40), "!"),
    "growth by a regex": (normalizers(*[replace("!?", "!!", "Regex")] * 40), "!"),
    "bytes of bytes": (pre_tokenizers(*[BYTES] * 40), "é"),
    "backtracking": (pre_tokenizers(split("(a|aa)+$")), "a" * 60 + "!"),
    "backtracking in a normalizer": (normalizers(replace("(x+x+)+y", "z", "Regex")), "x" * 60),
    "many slow starts": (pre_tokenizers(split(r"\s+$")), (" " * 999 + "x") * 999),
}


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes are not waited for, and nothing is slow for the machine's being busy."""
    defaults = EncoderApart.__init__.__kwdefaults__
    assert defaults["seconds"] == 5.0
    monkeypatch.setitem(defaults, "seconds", PATIENCE)
    monkeypatch.setitem(defaults, "memory", 256 << 20)


@pytest.mark.parametrize("name", HOSTILE)
def test_costs_its_own_request_only(name: str, tmp_path: Path) -> None:
    change, text = HOSTILE[name]
    tokenizer = load(tmp_path, change)
    assert isinstance(tokenizer._encoder, EncoderApart)
    tokenizer._encoder._apart._seconds = 0.3  # or minutes
    with pytest.raises(TokenizerError, match="the text cannot be tokenized"):
        tokenizer.encode(text)


def test_the_next_text_is_encoded(tmp_path: Path) -> None:
    change, text = HOSTILE["growth"]
    tokenizer = load(tmp_path, change)
    with pytest.raises(TokenizerError, match="the tokenizer's process died"):
        tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_panics_are_errors(tmp_path: Path) -> None:
    """The library's panics are no `Exception`."""
    values = json.loads((RECORDED / "qwen2" / "tokenizer.json").read_text())
    pre_tokenizers(split("(a|aa)+$"))(values)
    encoder = Encoder(Backend.from_str(json.dumps(values)), [])
    with pytest.raises(ValueError, match="the tokenizers library failed"):
        encoder.ids("a" * 60 + "!")


def around(ids: int, times: int) -> Change:
    """Puts so many tokens before every text, so many times."""
    name = "<|endoftext|>"
    piece = {"SpecialToken": {"id": name, "type_id": 0}}
    return lambda values: values.update(
        post_processor={
            "type": "TemplateProcessing",
            "single": [piece] * times + [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {name: {"id": name, "ids": [1] * ids, "tokens": [name] * ids}},
        }
    )


LOADING: dict[str, tuple[Change, str]] = {
    "a post-processor that grows": (around(10_000, 100_000), "more than 64 tokens around a text"),
    "a post-processor that adds much": (around(1, 65), "more than 64 tokens around a text"),
    "a token that grows": (
        lambda v: (
            normalizers(*[replace("!", "!" * 1000)] * 3)(v),
            v["added_tokens"].append(FLAGS | {"id": 560, "content": "!!", "normalized": True}),
        ),
        "cannot be used",
    ),
    "a character map": (
        normalizers({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "cannot be used",
    ),
    "a suffix that is copied for every word": (
        lambda v: v["model"].update(end_of_word_suffix="x" * 65),
        "end_of_word_suffix has 65 characters, more than 64",
    ),
    "no regex": (pre_tokenizers(split("(")), "unmatched parenthesis"),
    "an array for an object": (lambda v: v.update(normalizer=["Prepend", "a"]), "cannot be used"),
    "depth": (
        lambda v: v.update(normalizer=json.loads('{"a":' * 900 + "1" + "}" * 900)),
        "cannot be used",
    ),
    "more tokens than anybody adds": (
        lambda v: v["added_tokens"].extend(
            FLAGS | {"id": 560 + at, "content": f"<{at}>"} for at in range(100)
        ),
        "104 tokens are added, more than 100",
    ),
    "a flag that is none": (
        lambda v: v["added_tokens"][0].update(special="yes"),
        "added_tokens[0].special is 'yes'",
    ),
    "an id that is none": (lambda v: v["added_tokens"][0].update(id=-1), "has the id -1"),
    "no content": (lambda v: v["added_tokens"][0].pop("content"), "added_tokens[0] has no content"),
    "tokens that are none": (lambda v: v.update(added_tokens=[3]), "added_tokens[0] is a int"),
    "no list": (lambda v: v.update(added_tokens={"a": 1}), "added_tokens is not a list"),
}


@pytest.mark.parametrize("name", LOADING)
def test_refused_at_load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, reason = LOADING[name]
    assert hf_special_tokens.MAX_ADDED == 100_000
    monkeypatch.setattr(hf_special_tokens, "MAX_ADDED", 100)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, change)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer.json: ")
    assert reason in str(caught.value)


def test_what_families_do_is_bounded() -> None:
    for path in RECORDED.iterdir():
        assert unbounded(json.loads((path / "tokenizer.json").read_text())) is None
    values: dict[str, Any] = {}
    for name, cut in CUTS.items():
        pre_tokenizers(*map(split, cut.splits))(values)
        assert (unbounded(values) is None) == (name != "superbpe")


def test_a_pipeline_of_another_kind_is_as_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same tokens out of the process, chats and special tokens too; and it is said."""
    plain = load(tmp_path / "a", lambda values: None)
    with caplog.at_level(logging.WARNING):
        other = load(tmp_path / "b", lambda v: v["pre_tokenizer"]["pretokenizers"].insert(
            0, split("(?:zzz)+")
        ))  # fmt: skip
    assert "is not known to take bounded time and memory" in caplog.text
    cases = json.loads((RECORDED / "qwen2" / "cases.json").read_text())["cases"]
    for case in cases[::5]:
        assert other.encode(case["text"]) == plain.encode(case["text"]) == case["ids"]
    assert json.loads(other.backend_json())["pre_tokenizer"]["pretokenizers"][0]["type"] == "Split"


@pytest.mark.parametrize("dropout", [0.5, 1.0])
def test_dropout_is_off(dropout: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "the same prompt gives the same tokens, again and again"
    expected = load(tmp_path / "a", lambda v: None).encode(text)
    with caplog.at_level(logging.WARNING):
        tokenizer = load(tmp_path / "b", lambda v: v["model"].update(dropout=dropout))
    assert f"dropout {dropout} is left off" in caplog.text
    assert all(tokenizer.encode(text) == expected for _ in range(20))
