"""Chat templates: what they are given, and that no template can take the server with it."""

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.loader import chat_template, load, template_worker
from octavo.loader.base import ChatTemplateError
from octavo.loader.chat_template import JinjaChatTemplate
from paths import ORACLE
from patience import PATIENCE, held_up_until

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **kwargs: Any) -> str:
    return JinjaChatTemplate(source).render(messages, **kwargs)


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No template is slow for the machine's being busy, unless a test says what it may take."""
    defaults = JinjaChatTemplate.__init__.__kwdefaults__
    assert defaults["seconds"] == 2.0
    monkeypatch.setitem(defaults, "seconds", PATIENCE)


def refusal(source: str, messages: list[dict[str, Any]] = USER, **limits: Any) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        JinjaChatTemplate(source, **limits).render(messages)
    return str(caught.value)


def test_what_templates_see() -> None:
    template = JinjaChatTemplate(
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}"
        "{{ eos_token }}{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}",
        {"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert template.render(USER) == "<s><user>hi</s>>"
    assert template.render(USER, add_generation_prompt=False) == "<s><user>hi</s>"
    assert template.render(USER, enable_thinking=True) == "<s><user>hi</s>>True"


def test_blocks_are_trimmed_and_loops_controlled() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\nx\n{% endfor %}"
    )
    assert render(source, USER * 3) == "x\n"


def test_tojson_leaves_characters_alone() -> None:
    value = {"b": "<é&'>", "a": [1, None]}
    assert render("{{ value | tojson }}", value=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ value | tojson(indent=2) }}", value=value) == json.dumps(
        value, ensure_ascii=False, indent=2
    )


def test_strftime_now_and_generation_tags() -> None:
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {}}], "'image_url' is not supported"),
        (["text"], "'str' is not supported"),
        ([{"type": "text"}], "has no text"),
        ([{"type": "text", "text": 3}], "has no text"),
    ],
)
def test_other_content_is_refused(content: list[Any], reason: str) -> None:
    assert reason in refusal("x", [{"role": "user", "content": content}])


def test_what_is_null_is_left_out() -> None:
    source = "{{ messages[0].content is defined }}{{ messages[0].content }}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert render(source, [call]) == "False"


def test_the_templates_own_message() -> None:
    assert refusal("{{ raise_exception('roles must alternate') }}") == "roles must alternate"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "line 1 of the template: Expected an expression"),
        ("\n{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "the template failed: TypeError"),
        ("{{ messages[0].content.a.b }}", "'str object' has no attribute 'a'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_faults_are_reported(source: str, reason: str) -> None:
    assert reason in refusal(source)


def test_a_template_is_tried_without_messages() -> None:
    JinjaChatTemplate("{{ messages[7].nothing.at.all }}").check()
    with pytest.raises(ChatTemplateError, match="line 2 of the template"):
        JinjaChatTemplate("\n{% if %}").check()


def test_what_is_not_json_is_refused() -> None:
    assert "not JSON" in refusal("x", [{"role": "user", "content": object()}])
    circle: list[Any] = []
    circle.append(circle)
    assert "not JSON" in refusal("x", [{"role": "user", "name": circle}])


def test_lone_surrogates_are_refused() -> None:
    assert "surrogates" in refusal(
        "{{ messages[0].content }}", [{"role": "user", "content": "\ud800"}]
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '%s'.format.__func__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        assert render(source) == ""  # an undefined value
    except ChatTemplateError as error:
        assert "unsafe" in str(error) or "undefined" in str(error)  # noqa: PT017


HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10**10) %}{% endfor %}",
    "string": "{{ 'a' * 10**10 }}",
    "string at run time": "{{ messages[0].content * 10**10 }}",
    "list": "{{ messages * 10**10 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "doubling": (
        "{% set n = namespace(s='aa') %}"
        "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "filter": "{{ 'a' | center(10 ** 11) }}",
    "format": "{{ '%999999999999d' % 1 }}",
    "words": "{{ lipsum(n=10**8) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep expression": "{{" + "(" * 20000 + "1" + ")" * 20000 + "}}",
    "output": "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_limits_hold(name: str) -> None:
    reason = refusal(HOSTILE[name], seconds=0.5, memory=256 << 20)
    assert any(
        words in reason
        for words in ("longer than", "more than 256 MB", "too big", "recurses", "too large")
    ), reason


@contextmanager
def hurried(template: JinjaChatTemplate) -> Iterator[None]:
    """Who does not hang has all the time that a busy machine takes, before and behind."""
    apart = template._apart
    apart._seconds, before = 0.3, apart._seconds
    yield
    apart._seconds = before


def test_a_killed_template_starts_again() -> None:
    source = "{% if messages[0].content == 'hang' %}" + HOSTILE["loops"] + "{% endif %}ok"
    template = JinjaChatTemplate(source)
    assert template.render(USER) == "ok"
    for _ in range(2):
        with hurried(template), pytest.raises(ChatTemplateError, match=r"longer than 0\.3 s"):
            template.render([{"role": "user", "content": "hang"}])
        assert template.render(USER) == "ok"


@pytest.mark.parametrize("idle", [False, True])
def test_nothing_is_kept_of_a_dead_process(idle: bool) -> None:
    source = "{% if messages[0].content == 'hang' %}" + HOSTILE["loops"] + "{% endif %}ok"
    template = JinjaChatTemplate(source)
    template.render(USER)
    worker = weakref.ref(template._apart._idle[0])
    if idle:
        template._apart._idle[0]._process.kill()
        template._apart._idle[0]._process.wait()
        template.render(USER)
    else:
        with hurried(template), pytest.raises(ChatTemplateError, match="longer than"):
            template.render([{"role": "user", "content": "hang"}])
    gc.collect()
    assert worker() is None


def test_a_process_that_died_while_idle_is_replaced() -> None:
    template = JinjaChatTemplate("ok")
    assert template.render(USER) == "ok"
    process = template._apart._idle[0]._process
    process.kill()
    process.wait()
    assert template.render(USER) == "ok"


def test_a_process_that_is_ended_as_it_answers_is_not_kept() -> None:
    template = JinjaChatTemplate("x")
    template.render([])
    apart = template._apart
    assert apart._quick.acquire(blocking=False)
    worker = apart._free_worker()
    worker.give_up()
    apart._leave(worker, keep=True)
    assert worker not in apart._idle


def test_the_process_goes_with_its_template() -> None:
    template = JinjaChatTemplate("ok")
    template.render(USER)
    process = template._apart._idle[0]._process
    del template
    assert process.wait(PATIENCE) is not None


def test_no_rendering_waits_for_those_that_are_slow() -> None:
    """More of them than there are seats for: some are ended early, and none takes a quick seat."""
    source = "{% if messages[0].content == 'hang' %}" + HOSTILE["loops"] + "{% endif %}ok"
    template = JinjaChatTemplate(source, seconds=60.0)
    apart = template._apart
    template.render(USER)
    failed: list[str] = []

    def hang() -> None:
        try:
            template.render([{"role": "user", "content": "hang"}])
        except ChatTemplateError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=hang, daemon=True) for _ in range(apart._most_slow)]
    for thread in threads:
        thread.start()
    held_up_until(lambda: len(apart._slow) == apart._most_slow, "the slow ones")
    for _ in range(5):
        assert template.render(USER) == "ok"
    assert not failed
    apart._seconds = 0.4  # from now on a slow one has a part of that
    threads += [threading.Thread(target=hang, daemon=True) for _ in range(4)]
    for thread in threads[-4:]:
        thread.start()
    held_up_until(lambda: len(failed) >= 4, "the end of some")
    assert template.render(USER) == "ok"
    apart._seconds = 60.0
    for worker in [*apart._slow]:
        worker.give_up()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(failed) == len(threads)
    assert any("because too many others take as long" in error for error in failed)
    assert not apart._slow
    assert apart._workers == set(apart._idle)
    assert len(apart._idle) <= apart._most_quick
    assert template.render(USER) == "ok"


def test_threads_share_a_template() -> None:
    template = JinjaChatTemplate("{{ messages[0].content }}")
    wrong: list[str] = []

    def work(number: int) -> None:
        for index in range(50):
            text = f"{number}:{index}:" + "x" * (number * 1000)
            if template.render([{"role": "user", "content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_long_messages_pass() -> None:
    text = "é" * 2_000_000
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_smollm2_chats_as_recorded(smollm2_path: Path) -> None:
    template = load(smollm2_path).chat_template
    chats = json.loads((ORACLE / "smollm2.tokenizer.json").read_text())["chats"]
    assert chats
    for chat in chats:
        expected = chat.pop("text")
        assert template.render(chat.pop("messages"), **chat) == expected


RECORDED = json.loads((ORACLE / "templates.json").read_text())


class Here:
    """In place of a process of its own: 60 of them would take their time to start."""

    def __init__(self, module: str, hello: dict[str, Any], what: str) -> None:
        self.answer = template_worker.prepare(hello)

    def ask(self, request: bytes) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(self.answer(json.loads(request))))
        except Exception as error:
            return {"error": str(error)}


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["template"][:40])
def test_equals_transformers(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, filters, globals, blocks and scopes of `apply_chat_template`."""
    monkeypatch.setattr(chat_template, "Apart", Here)
    template = JinjaChatTemplate(case["template"], RECORDED["meta"]["tokens"])
    given = {"add_generation_prompt": False} | case["given"]
    if "error" in case:
        with pytest.raises(ChatTemplateError):
            template.render(case["messages"], **given)
    else:
        assert template.render(case["messages"], **given) == case["text"]
