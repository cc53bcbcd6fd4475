"""What is learned from: the answers as they were drawn, and the rows they were drawn from."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo.loader
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.llm import LLM
from octavo.loader.base import Checkpoint
from octavo.loader.dequantize import dequantize
from octavo.sampling.params import SamplingParams
from octavo.tools.train.medusa_training import _HELD_OUT, common_tokens
from octavo.tools.train.prompts import prompts
from octavo.tools.train.texts import _EVERY, Texts, as_prompts, lines_of, listen, spread
from paths import ORACLE, ROOT


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return octavo.loader.load(ORACLE / "tiny-llama-k.gguf")


def engine_config() -> EngineConfig:
    return EngineConfig(
        max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=1 << 20, threads=1, seed=0
    )


def test_answers_are_the_engines_own_and_their_rows_lead_to_them(checkpoint: Checkpoint) -> None:
    asked = [[5 + at, 9, 11 + at] for at in range(7)] + [[5] * 64]  # the last is too long
    loaded = load_engine(checkpoint, engine_config(), keep_hidden=True)
    told: list[tuple[int, int]] = []
    texts, refused = listen(
        loaded.engine, asked, 12, 3, lambda done, total: told.append((done, total))
    )
    loaded.engine.close()
    assert told[-1] == (7, 7)
    assert texts.num_answers == 7
    (why,) = refused
    assert "64" in why
    ends = np.flatnonzero(texts.left == 0)
    with LLM(load_engine(checkpoint, engine_config())) as llm:
        for index, end in enumerate(ends):
            first = 0 if index == 0 else ends[index - 1] + 1
            params = SamplingParams(
                temperature=0.7 if index == 3 else 0.0, seed=3 + index, max_tokens=12
            )
            (expected,) = llm.generate([asked[index]], params, use_tqdm=False)
            answer = texts.tokens[first : end + 1].tolist()
            assert answer == [asked[index][-1], *expected.outputs[0].token_ids]
            assert texts.left[first : end + 1].tolist() == list(range(len(answer)))[::-1]
            if index != 3:
                head = "token_embd" if checkpoint.config.tied_embeddings else "output"
                rows = dequantize(checkpoint.weights[head])
                logits = texts.hidden[first:end].astype(np.float32) @ rows.T
                assert (logits.argmax(axis=1) == texts.tokens[first + 1 : end + 1]).mean() > 0.9


def test_an_engine_that_can_take_no_prompt_teaches_nothing(checkpoint: Checkpoint) -> None:
    loaded = load_engine(checkpoint, engine_config(), keep_hidden=True)
    with pytest.raises(SettingsError, match=r"nothing to train with.* none of the prompts: .*64"):
        listen(loaded.engine, [[5] * 64], 4, 0, lambda done, total: None)
    loaded.engine.close()


def test_lines_are_prompts(checkpoint: Checkpoint) -> None:
    encode = checkpoint.tokenizer.encode
    lines = lines_of("abc\n\n  de \nf\n")
    assert lines == spread(lines, 10) == ["abc", "de", "f"]
    assert as_prompts(checkpoint, lines) == [encode("abc"), encode("de"), encode("f")]
    assert spread([chr(97 + at) for at in range(20)], 4) == ["a", "f", "k", "p"]


def test_a_prompt_is_asked_once(checkpoint: Checkpoint) -> None:
    """What is learned from it would else be measured on it."""
    assert lines_of("a\nb\na\n a \nc\nb") == ["a", "b", "c"]
    assert spread(lines_of("a\nb\n" * 50 + "c"), 3) == ["a", "b", "c"]
    assert as_prompts(checkpoint, ["a", "b", "a"]) == as_prompts(checkpoint, ["a", "b"])


def test_a_model_with_a_template_is_asked(checkpoint: Checkpoint) -> None:
    class Template:
        def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
            assert kwargs == {"add_generation_prompt": True}
            return f"<{messages[0]['role']}|{messages[0]['content']}>"

    asked = replace(checkpoint, chat_template=Template())
    (found,) = as_prompts(asked, ["abc"])
    assert found == checkpoint.tokenizer.encode("<user|abc>", add_special_tokens=False)


def test_there_are_prompts_without_a_text() -> None:
    mine = prompts(500, seed=1)
    assert len(set(mine)) == 500
    assert mine == prompts(500, seed=1) != prompts(500, seed=2)
    assert len(set(prompts(10**6))) == len(prompts(10**6)) > 2000


def test_no_prompt_is_one_that_is_measured_on() -> None:
    source = (ROOT / "benchmarks/_workloads.py").read_text("utf-8")
    assert not [line for line in prompts(10**6) if line in source]


@given(
    answers=st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=9), min_size=1, max_size=8),
    most=st.integers(1, 40),
)
def test_common_tokens_are_those_of_answers(answers: list[list[int]], most: int) -> None:
    texts = Texts(
        np.array([token for answer in answers for token in answer], np.int32),
        np.zeros((sum(map(len, answers)), 2), np.float16),
        np.array([left for answer in answers for left in range(len(answer))[::-1]], np.int32),
    )
    chosen = common_tokens(texts, most).tolist()
    drawn = [token for answer in answers for token in answer[1:]]
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(most, len(set(drawn)))
    rarest = min(drawn.count(token) for token in chosen)
    assert all(drawn.count(token) <= rarest for token in set(drawn) - set(chosen))


@given(sizes=st.lists(st.integers(2, 6), min_size=2, max_size=30), every=st.integers(2, 9))
def test_held_out_answers_are_whole_and_from_all_over(sizes: list[int], every: int) -> None:
    total = sum(sizes)
    left = np.concatenate([np.arange(size)[::-1] for size in sizes]).astype(np.int32)
    texts = Texts(np.arange(total, dtype=np.int32), np.zeros((total, 1), np.float16), left)
    kept, out = texts.split(every)
    answers = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    expected = answers[every - 1 :: every] or answers[-1:]
    assert out.tokens.tolist() == np.concatenate(expected).tolist()
    assert out.num_answers == len(expected)
    assert kept.num_answers == len(sizes) - len(expected)
    assert sorted([*kept.tokens, *out.tokens]) == list(range(total))


def test_greedy_and_sampled_answers_are_held_out() -> None:
    assert len({at % _EVERY for at in range(_HELD_OUT - 1, 400, _HELD_OUT)}) == _EVERY
