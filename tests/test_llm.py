"""`LLM`: the shape of its outputs, and that it leaves the engine clean whatever happens."""

import os
import signal
import threading

import pytest

import octavo
from counting import CountingEngine, loaded
from octavo import LLM, SamplingParams
from octavo.llm import GenerationError, Logprob
from octavo.loader.base import ChatTemplateError
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import AdmissionError, Outcome


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def llm(engine: CountingEngine) -> LLM:
    return LLM(loaded(engine))


def params(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def test_one_prompt_and_many(llm: LLM) -> None:
    [output] = llm.generate("hello", params(3), use_tqdm=False)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == list(b"hello")
    assert output.finished
    assert output.outputs[0].text == "abc"
    assert output.outputs[0].token_ids == list(b"abc")
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].logprobs is None
    assert output.metrics.outcome is Outcome.FINISHED

    outputs = llm.generate(
        ["one", [1, 2], {"prompt": "three"}, {"prompt": "x", "prompt_token_ids": [7]}],
        [params(4), params(1), params(2), params(3)],
        use_tqdm=True,
    )
    assert [output.outputs[0].text for output in outputs] == ["abcd", "a", "ab", "abc"]
    assert [output.prompt for output in outputs] == ["one", None, "three", "x"]
    assert [output.prompt_token_ids for output in outputs] == [
        list(b"one"), [1, 2], list(b"three"), [7],
    ]  # fmt: skip
    assert len({output.request_id for output in outputs}) == 4


def test_options_for_a_loaded_engine_are_refused(engine: CountingEngine) -> None:
    with pytest.raises(TypeError, match="threads"):
        LLM(loaded(engine), threads=3)


def test_a_list_of_ids_is_one_prompt(llm: LLM) -> None:
    assert len(llm.generate([1, 2, 3], use_tqdm=False)) == 1
    assert len(llm.generate([[1, 2], [3]], use_tqdm=False)) == 2
    assert llm.generate([], use_tqdm=False) == []


def test_choices_and_logprobs(llm: LLM) -> None:
    [output] = llm.generate("x", params(2, n=3, logprobs=2), use_tqdm=False)
    assert [choice.text for choice in output.outputs] == ["ab", "ab", "ab"]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    choice = output.outputs[1]
    assert choice.cumulative_logprob == -1.0
    assert choice.logprobs == [
        {ord(token): Logprob(-0.5, 2, token), ord("z"): Logprob(-0.25, 1, "z")} for token in "ab"
    ]


def test_chat(llm: LLM) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    [output] = llm.chat(messages, params(1), use_tqdm=False)
    assert output.prompt == "system: s\nuser: u\nassistant: "
    assert output.prompt_token_ids == list(output.prompt.encode())
    outputs = llm.chat([messages, messages[1:]], params(1), use_tqdm=False)
    assert [output.prompt for output in outputs] == [
        "system: s\nuser: u\nassistant: ", "user: u\nassistant: ",
    ]  # fmt: skip
    with pytest.raises(ChatTemplateError, match="the user speaks first"):
        llm.chat([{"role": "assistant", "content": "a"}])
    with pytest.raises(ChatTemplateError, match=r"counting\.gguf has no chat template"):
        LLM(loaded(CountingEngine(), chat=False)).chat(messages)


def test_everything_is_checked_before_anything_runs(llm: LLM, engine: CountingEngine) -> None:
    for prompts, error in (
        (["fine", ""], InvalidParameter),
        (["fine", []], InvalidParameter),
        (["fine", "\udcff"], InvalidParameter),
        (["fine", "long" * 1000], AdmissionError),
        (["fine", {"prompt": "x", "image": "y"}], ValueError),
        (["fine", {}], ValueError),
    ):
        with pytest.raises(error):
            llm.generate(prompts, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="temperature"):
        llm.generate(["a", "b"], [params(1), params(1, temperature=-1)], use_tqdm=False)
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        llm.generate(["a", "b"], [params(1)], use_tqdm=False)
    assert engine.most_at_once == 0


def test_a_full_queue_is_waited_for() -> None:
    engine = CountingEngine(queue=2)
    outputs = LLM(loaded(engine)).generate(
        [f"prompt {number}" for number in range(7)], params(2), use_tqdm=False
    )
    assert [output.outputs[0].text for output in outputs] == ["ab"] * 7
    assert engine.most_at_once == 2


def test_a_failure_leaves_the_others_whole(llm: LLM) -> None:
    with pytest.raises(GenerationError, match="1 of 3 requests failed; prompt 1: it was told") as e:
        llm.generate(["x", "fail", "y"], params(3), use_tqdm=False)
    assert [output.outputs[0].text for output in e.value.outputs] == ["abc", "a", "abc"]
    assert [output.outputs[0].finish_reason for output in e.value.outputs] == [
        "length", "error", "length",
    ]  # fmt: skip


def test_stream(llm: LLM) -> None:
    pieces = [(index, delta.text) for index, delta in llm.stream(["x", "y"], params(2))]
    assert pieces == [(0, "a"), (1, "a"), (0, "b"), (1, "b")]


def test_leaving_a_stream_aborts(llm: LLM, engine: CountingEngine) -> None:
    stream = llm.stream(["x", "y"], params(100))
    next(stream)
    with pytest.raises(RuntimeError, match="one call at a time"):
        llm.generate("z", use_tqdm=False)
    stream.close()
    assert len(engine.aborted) == 2
    assert not engine.has_work()
    assert llm.generate("z", params(1), use_tqdm=False)[0].outputs[0].text == "a"


def test_ctrl_c_stops_between_steps(llm: LLM, engine: CountingEngine) -> None:
    steps = 0

    def press() -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # a handler that raises would do so in here
                pass

    engine.on_step = press
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "y"], params(1000), use_tqdm=False)
    assert steps == 6  # the fifth was whole, the sixth delivered the aborts
    assert len(engine.aborted) == 2
    assert not engine.has_work()
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.generate("z", params(1), use_tqdm=False)[0].finished


def test_in_another_thread(llm: LLM) -> None:
    texts: list[str] = []
    thread = threading.Thread(
        target=lambda: texts.append(llm.generate("x", params(2), use_tqdm=False)[0].outputs[0].text)
    )
    thread.start()
    thread.join()
    assert texts == ["ab"]


def test_context_manager_closes(engine: CountingEngine) -> None:
    with LLM(loaded(engine)) as llm:
        llm.generate("x", params(1), use_tqdm=False)
    assert engine.closed


def test_names_of_the_package() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        octavo.nothing  # noqa: B018
