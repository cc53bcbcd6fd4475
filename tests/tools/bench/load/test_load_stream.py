import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.tools.bench.load.streamed_answer import EventSplitter, StreamedAnswer, error_message


def reference(stream: str) -> list[str]:
    """Data of the whole events, by the HTML standard's rules, a line at a time."""
    lines = stream.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]
    events: list[str] = []
    data: list[str] = []
    for line in lines:
        if line == "":
            if data:
                events.append("\n".join(data))
            data = []
        elif line.startswith("data:"):
            data.append(line[6:] if line[5:6] == " " else line[5:])
        elif line == "data":
            data.append("")
    return events


pieces = st.sampled_from(
    ["data: ", "data:", "data", '{"a":1}', "[DONE]", "\n\n", "\n", "\r\n", "\r\n\r\n", "\r",
     ": ping", "event: x", "id: 3", "é€😀", " ", "x"]
)  # fmt: skip


def feed(stream: bytes, cuts: list[int]) -> list[bytes]:
    splitter = EventSplitter()
    places = sorted({cut % (len(stream) + 1) for cut in cuts} | {0, len(stream)})
    return [
        event
        for begin, end in itertools.pairwise(places)
        for event in splitter.feed(stream[begin:end])
    ]


@given(st.lists(pieces, max_size=30).map("".join), st.lists(st.integers(0, 10**6), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_were_cut(text: str, cuts: list[int]) -> None:
    stream = text.encode() + b"\n\n"  # so that no line is left open
    expected = [event.encode() for event in reference(stream.decode())]
    assert feed(stream, cuts) == expected
    assert feed(stream, list(range(len(stream)))) == expected


def token(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def answer(*timed: tuple[bytes, float], status: int = 200) -> StreamedAnswer:
    found = StreamedAnswer(keep_text=True)
    found.start = 10.0
    found.status = status
    for data, now in timed:
        if not found.data(data, now):
            return found
    found.end()
    return found


async def test_times_are_of_events_with_a_token() -> None:
    found = answer(
        (b": ping\n\n", 10.5), (token("a"), 11.0), (token("") + token("b"), 12.0),
        (token("c", "stop"), 14.0), (USAGE, 15.0), (DONE, 16.0),
    )  # fmt: skip
    assert found.success
    assert found.ended.done()
    assert (found.ttft, found.latency) == (1.0, 4.0)
    assert found.itl.tolist() == [1.0, 0.0, 2.0]
    assert (found.events, found.output_tokens, found.prompt_tokens) == (4, 3, 5)
    assert found.text == "abc"


async def test_a_chat_answer_begins_with_its_first_token_not_its_role() -> None:
    def delta(value: object, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": value, "finish_reason": finish}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    found = answer(
        (delta({"role": "assistant", "content": ""}), 10.1),
        (delta({"reasoning_content": "hm"}), 12.0),
        (delta({"role": "assistant", "content": "a"}), 13.0),
        (delta({}, "stop"), 13.5),
        (DONE, 14.0),
    )
    assert found.ttft == 2.0
    assert found.itl.tolist() == [1.0, 0.5]
    assert found.output_tokens is None
    assert found.text == "hma"


async def test_usage_in_each_event_counts_once() -> None:
    def both(text: str, made: int) -> bytes:
        value = {
            "choices": [{"text": text}],
            "usage": {"prompt_tokens": 4, "completion_tokens": made},
        }
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    found = answer((both("a", 1), 11.0), (both("b", 2), 12.0), (DONE, 12.0))
    assert (found.events, found.output_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        (b"data: {broken\n\n", "malformed event", "{broken"),
        (b"data: 7\n\n", "malformed event", "7"),
        (b"data: \xff\n\n", "malformed event", ""),
        (b'data: {"choices":[{"text":5}]}\n\n', "malformed event", "text"),
        (b'data: {"error":{"message":"out of blocks"}}\n\n', "error event", "out of blocks"),
        (USAGE + DONE, "no token", "[DONE] came"),
        (b"", "no token", "did not come"),
        (token("a"), "stream ended early", "after 1 events"),
        (token("a") + b"data: [DO", "stream ended early", "after 1 events"),
    ],
)
async def test_a_stream_that_is_none_has_failed(data: bytes, reason: str, detail: str) -> None:
    found = answer((data, 11.0))
    assert not found.success
    assert found.reason.startswith(reason)
    assert detail in found.detail


async def test_done_or_a_finish_reason_ends_a_stream() -> None:
    assert answer((token("a", "length"), 11.0)).success
    assert answer((token("a") + DONE, 11.0)).success


async def test_another_status_fails_with_the_servers_words() -> None:
    found = answer((b'{"error": {"mes', 11.0), (b'sage": "too many"}}', 11.0), status=429)
    assert (found.reason, found.detail) == ("HTTP 429", "too many")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m", "code": 4}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b'{"message": "m"}', "m"),
        (b'{"x": 1}', '{"x":1}'),
        (b"<h1>\n Bad  gateway", "<h1> Bad gateway"),
        (b"\xff", "�"),
        (b"", ""),
    ],
)
def test_error_messages(body: bytes, message: str) -> None:
    assert error_message(body) == message


@given(st.binary(max_size=200), st.integers(100, 599))
async def test_any_bytes_end_one_way(data: bytes, status: int) -> None:
    found = answer((data, 11.0), status=status)
    assert found.ended.done()
    assert found.reason
