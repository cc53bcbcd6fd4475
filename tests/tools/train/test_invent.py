"""Questions that a model invents: how it is asked for them, and which are taken."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo.loader
from octavo.engine.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.outputs import Delta
from octavo.loader.base import Checkpoint
from octavo.scheduler.request import FinishReason, Request
from octavo.tools.train.invent import invented, unlike
from paths import ORACLE

MODEL = ORACLE / "tiny-llama-k.gguf"


class Template:
    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        return f"[user {messages[0]['content']} end]\n[assistant"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return replace(octavo.loader.load(MODEL), chat_template=Template())


class Engine:
    """Goes on as it is told, in two pieces; ``says`` gets a number and the user's first words."""

    def __init__(self, checkpoint: Checkpoint, says: Callable[[int, str], str | None]) -> None:
        self.decode = checkpoint.tokenizer.decode
        self.says = says
        self.requests: list[Request] = []
        self.waiting: list[Request] = []

    def check(self, request: Request) -> Request:
        return request

    def add_request(self, request: Request) -> None:
        self.requests.append(request)
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Delta]:
        request = self.waiting.pop()
        head = self.decode(request.prompt_token_ids)
        assert head.startswith("[user ")
        text = self.says(int(request.request_id), head.removeprefix("[user "))
        end = FinishReason.STOP if text is not None else FinishReason.LENGTH
        text = text or "and on and on and on"
        return [
            Delta(request.request_id, 0, text[:5], []),
            Delta(request.request_id, 0, text[5:], [], finish_reason=end),
        ]


def test_turns_are_begun_and_what_is_said_is_the_rest(checkpoint: Checkpoint) -> None:
    engine: Any = Engine(checkpoint, lambda number, begun: f" are {number} such things?")
    told: list[tuple[int, int]] = []
    found = invented(
        engine, checkpoint, 60, 5, progress=lambda done, total: told.append((done, total))
    )
    assert len(set(found)) == len(found) == 60
    assert told[-1] == (60, 60)
    begun = [each for each in found if not each.startswith("are ")]
    assert 20 <= len(begun) <= 40
    assert any(each.startswith("What are ") for each in begun)
    assert any(each.startswith("Can you are ") for each in begun)
    params = [request.params for request in engine.requests]
    assert len({each.seed for each in params}) == len(params)
    assert all(each.temperature == 1.0 and "end]" in each.stop for each in params)
    assert found == invented(engine, checkpoint, 60, 5)


def test_what_is_no_question_or_was_asked_before_is_asked_for_again(checkpoint: Checkpoint) -> None:
    def says(number: int, begun: str) -> str | None:
        bad = [None, "short", "The  same AGAIN!"]
        return bad[number % 3] if number % 2 else f"one of {number} more"

    engine: Any = Engine(checkpoint, says)
    found = invented(engine, checkpoint, 40, 0)
    assert len(found) == 40
    assert not any("short" in each or "on and on" in each for each in found)
    assert found.count("The  same AGAIN!") <= 1
    again = invented(engine, checkpoint, 40, 0, lambda question: "more" not in question)
    assert 0 < len(again) < 40  # there are no more, however often it is asked
    assert all("same AGAIN!" in each for each in again)


def test_a_model_that_does_not_chat_invents_nothing(checkpoint: Checkpoint) -> None:
    class Silent(Template):
        def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
            return "whatever was said"

    engine: Any = Engine(checkpoint, lambda number, begun: "who is it?")
    assert invented(engine, replace(checkpoint, chat_template=None), 5, 0) == []
    assert invented(engine, replace(checkpoint, chat_template=Silent()), 5, 0) == []
    assert engine.requests == []


def test_a_real_engine_is_asked_as_it_can_be(checkpoint: Checkpoint) -> None:
    """What a random model says is no question; but it is asked, and ends."""
    config = EngineConfig(max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=1 << 20)
    loaded = load_engine(replace(checkpoint), config)
    found = invented(loaded.engine, loaded.checkpoint, 4, 0)
    assert found == invented(loaded.engine, loaded.checkpoint, 4, 0)
    loaded.engine.close()


def test_what_asks_for_the_same_is_left_out() -> None:
    keep = unlike(["How can a beginner learn to play the guitar?", "Why is it so?"])
    assert not keep("how can a BEGINNER learn to play the guitar")
    assert not keep("I want to learn the guitar as a beginner: what do I play first?")
    assert not keep("Why is it so")
    assert keep("How can a beginner learn to swim?")
    assert keep("Why is it red?")
    assert unlike([])("anything")


@given(
    words=st.lists(st.text("abcdefgh", min_size=4, max_size=8), min_size=1, max_size=8),
    more=st.lists(st.text("abcdefgh", max_size=6), max_size=5),
    order=st.randoms(),
)
def test_no_order_of_its_words_makes_a_question_another(
    words: list[str], more: list[str], order: Any
) -> None:
    mixed = words + more
    order.shuffle(mixed)
    assert not unlike([" ".join(words)])(" ".join(mixed))
