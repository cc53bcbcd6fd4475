"""Buckets and what is charged to them, by a clock that the test moves."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.scheduler.request import Outcome, RequestRecord
from octavo.server import quota
from octavo.server.api_keys import ApiKey
from octavo.server.errors import ApiError, too_many
from octavo.server.quota import Account


class Clock:
    now = 0.0

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(quota, "time", clock)
    return clock


def account(requests: int | None, tokens: int | None) -> Account:
    """That of a key with these limits a minute."""
    limits = {"max_requests_per_minute": requests, "max_tokens_per_minute": tokens}
    return Account(ApiKey(name="k", digest=b"", **limits))  # type: ignore[arg-type]


def record(prompt: int, **fields: Any) -> RequestRecord:
    found = RequestRecord("r", 0.0, prompt)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def test_requests_a_minute(clock: Clock) -> None:
    key = account(3, None)
    for _ in range(3):
        key.open().of([record(1)])
    with pytest.raises(ApiError) as refused:
        key.open()
    assert refused.value.headers == {"Retry-After": "20", "retry-after-ms": "20000"}
    assert "'k' has used up its 3 requests a minute" in refused.value.message
    clock.now = 19.99
    with pytest.raises(ApiError):
        key.open()
    clock.now = 20.0
    key.open()


def test_what_is_generated_is_charged_as_it_comes(clock: Clock) -> None:
    key = account(None, 600)  # ten a second
    charge = key.open()
    charge.prompts([100])
    live = record(100)
    charge.of([live])
    assert dict(key.headers())[b"x-ratelimit-remaining-tokens"] == b"500"
    live.completion_tokens = 550
    with pytest.raises(ApiError) as refused:  # 50 are owed, and one is needed
        key.open()
    assert refused.value.headers["retry-after-ms"] == "5100"
    live.outcome = Outcome.FINISHED
    charge.close()
    charge.close()  # again is nothing
    clock.now = 5.0
    assert dict(key.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    clock.now = 5.1
    key.open().prompts([1])


def test_a_prompt_waits_until_there_is_enough_or_the_bucket_is_full(clock: Clock) -> None:
    key = account(None, 60)
    first = key.open()
    first.prompts([200])  # more than ever fits: from a full bucket
    first.of([record(200, outcome=Outcome.ABORTED)])
    first.close()
    with pytest.raises(ApiError) as refused:
        key.open()
    assert refused.value.headers["Retry-After"] == "141"
    clock.now = 141.0
    second = key.open()
    with pytest.raises(ApiError) as refused:
        second.prompts([30])
    assert refused.value.headers["Retry-After"] == "29"


def test_what_is_refused_costs_nothing(clock: Clock) -> None:
    key = account(2, 100)
    before = key.headers()
    for records in ([], [record(40, outcome=Outcome.REJECTED)]):
        charge = key.open()
        charge.prompts([40])
        charge.of(records)
        charge.close()
        assert key.headers() == before
    charge = key.open()
    charge.prompts([80])  # one prompt of two was shed
    ran = record(40, outcome=Outcome.FINISHED, completion_tokens=7)
    charge.of([record(40, outcome=Outcome.REJECTED), ran])
    charge.close()
    after = dict(key.headers())
    assert after[b"x-ratelimit-remaining-requests"] == b"1"
    assert after[b"x-ratelimit-remaining-tokens"] == b"53"


def test_a_wait_of_hours_is_told_as_it_is(clock: Clock) -> None:
    """Who comes back when told to is let in."""
    key = account(None, 1)
    charge = key.open()
    charge.prompts([1])
    charge.of([record(1, completion_tokens=180, outcome=Outcome.FINISHED)])
    charge.close()
    with pytest.raises(ApiError) as refused:
        key.open()
    assert refused.value.headers == {"Retry-After": "10860", "retry-after-ms": "10860000"}
    clock.now = 10860.0
    key.open()
    assert too_many("", 1e9, "capacity").headers["Retry-After"] == "3600"


def test_all_prompts_of_a_body_wait() -> None:
    key = account(None, None)
    charge = key.open()
    assert key.waiting == 1  # one at least, before it is read
    charge.prompts([5, 6, 7])
    assert key.waiting == 3
    records = [record(5), record(6), record(7)]
    charge.of(records)
    assert key.waiting == 3
    records[1].scheduled = 1.0
    records[2].outcome = Outcome.REJECTED
    assert key.waiting == 1
    charge.close()
    assert key.waiting == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0ms"),
        (0.02, "20ms"),
        (4.5, "4.5s"),
        (60, "1m0s"),
        (363.25, "6m3.25s"),
        (3600, "1h0m0s"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert quota._duration(seconds) == said


@given(
    st.integers(1, 50),
    st.integers(1, 500),
    st.lists(
        st.tuples(
            st.floats(0, 30),  # seconds until
            st.integers(1, 300),  # prompt
            st.integers(0, 100),  # answer
            st.sampled_from(list(Outcome)),
        ),
        max_size=40,
    ),
)
def test_no_more_is_served_than_the_time_allows(
    requests: int, tokens: int, life: list[tuple[float, int, int, Outcome]]
) -> None:
    """And who comes back when told to is served, but not a moment before."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quota, "time", clock)
        key = account(requests, tokens)
        served = spent = 0
        for pause, prompt, answer, outcome in life:
            clock.now += pause
            while True:
                charge = None
                try:
                    charge = key.open()
                    charge.prompts([prompt])
                    break
                except ApiError as refused:
                    if charge is not None:
                        charge.close()
                    clock.now += int(refused.headers["retry-after-ms"]) / 1000
            level = spent - tokens * clock.now / 60
            assert level <= tokens - min(prompt, tokens) + 1e-6
            charge.of([record(prompt, completion_tokens=answer, outcome=outcome)])
            charge.close()
            if outcome is not Outcome.REJECTED:
                served += 1
                spent += prompt + answer
            assert served <= requests + requests * clock.now / 60 + 1e-6
