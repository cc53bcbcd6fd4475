"""A sequence's text against decoding everything at once and searching all of it."""

import codecs
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.outputs import SequenceOutput
from octavo.loader import load
from octavo.loader.base import Tokenizer
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import FinishReason

EOS = 0
USER_STOP = 1
SPECIAL = 2


class TableTokenizer:
    """A token an id: three special ones, the 256 bytes, and some longer pieces."""

    bos_token_id = None
    eos_token_ids = frozenset({EOS})

    def __init__(self) -> None:
        pieces = ["a", "b", "ab", "ba", "abc", " é", "é", "日本", "🙂", "END", "EN", "D", "\ufffd"]
        self.table = [
            b"",
            b"",
            b"",
            *(bytes([byte]) for byte in range(256)),
            *(piece.encode() for piece in pieces),
            "日".encode()[:2],
            "日".encode()[2:] + b"a",
        ]
        self.vocab_size = len(self.table)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]

    def token_text(self, token_id: int) -> str:
        return (
            f"<{token_id}>"
            if token_id <= SPECIAL
            else self.table[token_id].decode(errors="replace")
        )

    def is_special(self, token_id: int) -> bool:
        return token_id <= SPECIAL


TOKENIZER = TableTokenizer()
_: Tokenizer = TOKENIZER

letters = st.sampled_from([3 + ord("a"), 3 + ord("b"), *range(259, 264)])
ids = st.one_of(
    st.lists(letters, max_size=40),
    st.lists(st.one_of(st.integers(0, TOKENIZER.vocab_size - 1), letters), max_size=40),
)
# Few letters, so that stop strings overlap and contain each other; many, so that all kinds occur.
stop_strings = st.one_of(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abEND日é\ufffd", min_size=1, max_size=5), max_size=4),
)


# Text, number of tokens, whether they end the output, what ends it
Pushed = tuple[str, int, FinishReason | None, str | int | None]
STOP = FinishReason.STOP
NO_SAMPLER: Any = None


def output(params: SamplingParams, stop_token_ids: Collection[int] = ()) -> SequenceOutput:
    return SequenceOutput(TOKENIZER, params, stop_token_ids, NO_SAMPLER)


def run(token_ids: list[int], params: SamplingParams, chunk: int = 1) -> tuple[str, Pushed]:
    """Everything pushed, in chunks; the joined text and a summary of the whole."""
    pushed = output(params, params.ending_ids(TOKENIZER.eos_token_ids))
    text, count = "", 0
    for start in range(0, len(token_ids), chunk):
        more, taken, reason, stop = pushed.push(token_ids[start : start + chunk])
        text += more
        count += taken
        if reason:
            return text, (text, count, reason, stop)
    text += pushed.finish()
    return text, (text, count, None, None)


def expected(token_ids: list[int], params: SamplingParams) -> Pushed:
    """The same by decoding every prefix from its beginning and trying every end of the text."""
    endings = params.ending_ids(TOKENIZER.eos_token_ids)

    def data(token_id: int) -> bytes:
        if TOKENIZER.is_special(token_id) and not params.skip_special_tokens:
            return TOKENIZER.token_text(token_id).encode()
        return TOKENIZER.token_bytes(token_id)

    def certain(count: int) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return decoder.decode(b"".join(map(data, token_ids[:count])))

    def whole(count: int) -> str:
        return b"".join(map(data, token_ids[:count])).decode(errors="replace")

    for count, token_id in enumerate(token_ids, 1):
        if token_id in endings:
            text = whole(count if params.include_stop_str_in_output else count - 1)
            reason = token_id if token_id in params.stop_token_ids else None
            return text, count, STOP, reason
        text = certain(count)
        if count < params.min_tokens:
            continue
        for end in range(len(certain(count - 1)) + 1, len(text) + 1):
            for stop in sorted(params.stop, key=len, reverse=True):
                if text[:end].endswith(stop):
                    kept = end if params.include_stop_str_in_output else end - len(stop)
                    return text[:kept], count, STOP, stop
    return whole(len(token_ids)), len(token_ids), None, None


@settings(max_examples=500)
@given(
    token_ids=ids,
    stop=stop_strings,
    stop_token_ids=st.sampled_from([(), (USER_STOP,), (USER_STOP, EOS)]),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
    ignore_eos=st.booleans(),
    skip=st.booleans(),
    chunk=st.integers(1, 5),
)
def test_equals_decoding_everything_and_searching_all_of_it(
    token_ids: list[int],
    stop: list[str],
    stop_token_ids: tuple[int, ...],
    min_tokens: int,
    include: bool,
    ignore_eos: bool,
    skip: bool,
    chunk: int,
) -> None:
    params = SamplingParams(
        stop=tuple(stop),
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        ignore_eos=ignore_eos,
        skip_special_tokens=skip,
    )
    text, whole = run(token_ids, params, chunk)
    assert whole == expected(token_ids, params)
    assert text == whole[0]


@settings(max_examples=600)
@given(token_ids=ids, stop=stop_strings)
def test_holds_back_exactly_what_may_become_a_stop_string(
    token_ids: list[int], stop: list[str]
) -> None:
    params = SamplingParams(stop=tuple(stop), ignore_eos=True, min_tokens=len(token_ids) + 1)
    detokenizer = output(params)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    certain = sent = ""
    for token_id in token_ids:
        certain += decoder.decode(TOKENIZER.token_bytes(token_id))
        sent += detokenizer.push([token_id])[0]
        held = max(
            (
                length
                for string in stop
                for length in range(min(len(string) - 1, len(certain)) + 1)
                if certain.endswith(string[:length])
            ),
            default=0,
        )
        assert sent == certain[: len(certain) - held]


def test_a_character_split_over_tokens_arrives_whole() -> None:
    detokenizer = output(SamplingParams())
    deltas = [detokenizer.push([3 + byte])[0] for byte in "é日🙂".encode()]
    assert deltas == ["", "é", "", "", "日", "", "", "", "🙂"]
    assert detokenizer.finish() == ""


def test_a_character_cut_off_by_the_end_is_one_replacement() -> None:
    detokenizer = output(SamplingParams())
    assert detokenizer.push([3 + byte for byte in "🙂".encode()[:3]])[0] == ""
    assert detokenizer.finish() == "\ufffd"


def test_thousands_of_invalid_bytes_keep_flowing_and_nothing_piles_up() -> None:
    detokenizer = output(SamplingParams(stop=("END",)))
    invalid = 3 + 0xFF
    for _ in range(5000):
        assert detokenizer.push([invalid])[0] == "\ufffd"
        # What the next token's cost can depend on.
        assert (detokenizer._held, detokenizer._partial) == ("", b"")
    assert detokenizer.finish() == ""


def test_leads_without_followers_are_replaced_as_soon_as_that_is_certain() -> None:
    detokenizer = output(SamplingParams())
    lead = 3 + 0xE6
    assert detokenizer.push([lead])[0] == ""
    for _ in range(1000):
        assert detokenizer.push([lead])[0] == "\ufffd"
    assert detokenizer.finish() == "\ufffd"


def test_a_stop_string_across_tokens_is_never_sent() -> None:
    detokenizer = output(SamplingParams(stop=("abEND",)))
    push = [TOKENIZER.table.index(piece) for piece in (b"ba", b"b", b"EN", b"D")]
    assert [detokenizer.push([token_id]) for token_id in push] == [
        ("b", 1, None, None),
        ("", 1, None, None),
        ("", 1, None, None),
        ("", 1, STOP, "abEND"),
    ]


def test_text_that_only_looked_like_a_stop_string_is_released_in_order() -> None:
    detokenizer = output(SamplingParams(stop=("abEND",)))
    push = [TOKENIZER.table.index(piece) for piece in (b"ab", b"EN", b"ab")]
    assert [detokenizer.push([token_id])[0] for token_id in push] == ["", "", "abEN"]
    assert detokenizer.finish() == "ab"


def test_a_block_of_tokens_ends_at_the_stop() -> None:
    params = SamplingParams(stop=("b",))
    detokenizer = output(params, {EOS})
    letters = [3 + ord(letter) for letter in "xabyz"]
    assert detokenizer.push(letters) == ("xa", 3, STOP, "b")
    detokenizer = output(SamplingParams(), {EOS})
    assert detokenizer.push([*letters, EOS, *letters]) == ("xabyz", 6, STOP, None)


def test_a_stop_string_completed_before_min_tokens_does_not_stop() -> None:
    params = SamplingParams(stop=("b",), min_tokens=3)
    letters = [3 + ord(letter) for letter in "abab"]
    assert run(letters, params)[1] == ("aba", 4, STOP, "b")
    assert run(letters, SamplingParams(stop=("b",), min_tokens=2))[1] == ("a", 2, STOP, "b")


def _check_real(path: Path) -> None:
    tokenizer = load(path).tokenizer
    text = (
        " The capital – naïve café, 日本語テキスト 🙂👩‍👩‍👧 \t\n\n  def f(x):\n    return x\u0301 ﷽"
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = SequenceOutput(tokenizer, SamplingParams(), tokenizer.eos_token_ids, NO_SAMPLER)
    deltas = [detokenizer.push([token_id])[0] for token_id in token_ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(token_ids) == text


def test_byte_level_tokens_of_a_real_model(smollm2_path: Path) -> None:
    _check_real(smollm2_path)


def test_sentencepiece_tokens_of_a_real_model(gemma3_path: Path) -> None:
    _check_real(gemma3_path)


@pytest.mark.parametrize("include", [False, True])
def test_special_tokens_are_text_only_when_asked(include: bool) -> None:
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
    text, whole = run([3 + ord("a"), SPECIAL, EOS], params)
    assert text == ("a<2><0>" if include else "a<2>")
    assert whole[1] == 3
