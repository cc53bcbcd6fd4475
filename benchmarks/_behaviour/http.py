"""Answers and errors of live servers to some hundred HTTP requests.

The status, the body and the headers of each answer are recorded. "…" stands for the values of
headers that are of a moment (`_OF_A_MOMENT`), of times in bodies (`_TIMES`), for 32 hexadecimal
digits, which are an id, and for a number of seconds in a text. Of /metrics and /requests only
names and types are recorded, of an OpenAPI description everything but the prose. The chunks of a
stream depend on when they are read: recorded are the fields of the first and the last chunk of
each choice, what its deltas give together, and all that is no delta.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _behaviour import models
from _behaviour.serving import Answer, Server, pieces, serving

_OF_A_MOMENT = (
    *("date", "content-length", "x-request-id", "retry-after", "retry-after-ms"),
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
_TIMES = frozenset(("created",))
_PROSE = frozenset(("description", "summary", "title"))
NAME = "m"  # of the model


@dataclass
class Case:
    name: str
    method: str
    path: str
    body: object = None
    headers: dict[str, str] | None = None
    raw: bytes | None = None  # sent instead


# Normalised answers


def shown(answer: Answer, path: str = "") -> dict[str, Any]:
    headers = {}
    for name, value in answer.headers:
        name = name.lower()
        headers[name] = "…" if name in _OF_A_MOMENT else value
    found: dict[str, Any] = {"status": answer.status, "headers": dict(sorted(headers.items()))}
    kind = headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        found["stream"] = _stream(pieces(answer.body))
    elif kind.startswith("application/json") and answer.body:
        body = json.loads(answer.body)
        if path.startswith("/requests") and answer.status == 200:
            body = _types(body)
        found["body"] = _plain(_without(body, _PROSE) if path == "/openapi.json" else body)
    elif path == "/metrics" or kind.startswith("text/html"):
        found["body"] = "…"
    else:
        found["body"] = answer.body.decode("utf-8", "replace")
    return found


def _plain(value: Any) -> Any:
    """Return ``value`` without what is of a moment."""
    if isinstance(value, dict):
        return {key: "…" if key in _TIMES else _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str):  # a time that a client has to wait, an id in a text
        value = re.sub(r"\d+(\.\d+)? (s|ms|seconds?)\b", r"… \2", value)
        return re.sub(r"\b[0-9a-f]{32}\b", "…", value)
    return value


def _types(value: Any) -> Any:
    """Return names and types. A list has those of its first item."""
    if isinstance(value, dict):
        return {key: _types(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_types(each) for each in value[:1]]
    return type(value).__name__


def _without(value: Any, keys: frozenset[str]) -> Any:
    """Return an OpenAPI description without texts under ``keys``."""
    if isinstance(value, dict):
        return {
            key: _without(each, keys)
            for key, each in value.items()
            if not (key in keys and isinstance(each, str))
        }
    return [_without(each, keys) for each in value] if isinstance(value, list) else value


def _stream(events: list[Any]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    rest: list[Any] = []
    envelope: dict[str, Any] = {}
    for event in events:
        if not isinstance(event, dict) or not event.get("choices"):
            rest.append(_plain(event))
            continue
        envelope = {key: value for key, value in event.items() if key not in ("choices", "usage")}
        for choice in event["choices"]:
            _join(choices.setdefault(choice["index"], {"first": sorted(_leaves(choice))}), choice)
    return {"envelope": _plain(envelope), "choices": _plain(choices), "rest": rest}


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else key)
    else:
        yield path


def _join(all_: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add a chunk's texts and lists to those before it; of the rest the last value is kept."""
    all_["last"] = sorted(_leaves(choice))
    for path, value in _flat(choice):
        before = all_.get(path)
        if (
            isinstance(value, (str, list))
            and isinstance(before, type(value))
            and path != "delta.role"
        ):
            all_[path] = before + value
        elif value is not None or path not in all_:
            all_[path] = value


def _flat(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, dict) and key in ("delta", "logprobs"):
            yield from _flat(each, f"{path}{key}.")
        else:
            yield f"{path}{key}", each


def metrics(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return type and label names of each metric, and their help texts."""
    found: dict[str, Any] = {}
    helps: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, helps[name] = line[7:].partition(" ")
            helps[name] = line[7:].partition(" ")[2]
        elif line.startswith("# TYPE "):
            name, _, kind = line[7:].partition(" ")
            found[name] = {"type": kind, "samples": []}
        elif line and not line.startswith("#"):
            sample, _, labels = line.rpartition(" ")[0].partition("{")
            names = sorted(re.findall(r'(\w+)="', labels))
            shape = f"{sample} {' '.join(names)}"
            if shape not in found[name]["samples"]:
                found[name]["samples"].append(shape)
    return found, helps


# Cases


def _fields() -> dict[str, list[Any]]:
    """Return values of fields that both ways to generate have: good ones and bad ones."""
    return {
        "model": [NAME, "alias", "other", 7, None],
        "n": [2, 0, 129, "2", None],
        "stream_options": [{"include_usage": True}, {"include_usage": 1}, {"typo": True}],
        "stop": ["e", ["e", "a"], [], [""], ["x"] * 33, 7, [7], "x" * 257],
        "seed": [7, -1, 2**63, 1.5],
        "temperature": [0.5, 2, -1, 101, "hot", None],
        "top_p": [0.5, 0, 1.1],
        "presence_penalty": [1, 2.1],
        "frequency_penalty": [-1, -2.1],
        "logit_bias": [{"5": 10}, {"5": 101}, {"x": 1}, {"-1": 1}, {"5": 1, "05": 1}, [5]],
        "max_tokens": [1, 0, -1, 10**6, 2**31, 1.5],
        "top_k": [5, -2, 1.5],
        "min_p": [0.1, 2],
        "repetition_penalty": [1.1, 0],
        "min_tokens": [2, 9, -1],
        "ignore_eos": [True, 1],
        "stop_token_ids": [[5], [-1], [10**9], 5],
        "include_stop_str_in_output": [True, "yes"],
        "skip_special_tokens": [False, 0],
        "allowed_token_ids": [[40, 41, 42], [], [10**9]],
        "banned_token_ids": [[5], ["5"]],
        "prompt_logprobs": [1, -1, 21],
        "priority": [0, 1, 2**31, "high"],
        "cache_salt": ["tenant", "", "a\0b", 7],
        "add_special_tokens": [False],
        "return_token_ids": [True],
        "return_tokens_as_token_ids": [True],
        "return_prediction_details": [True],
        "slo": [{"ttft": 60000}, {"ttft": 0}, {"typo": 1}],
        "user": ["someone", "x" * 513, 7],
        "metadata": [{"a": "b"}, {"a": 1}, {str(at): "" for at in range(17)}],
        "store": [False, True],
        "service_tier": ["auto", "flex"],
        "response_format": [{"type": "text"}, {"type": "json_object"}],
        "use_beam_search": [True],
        "bad_words": [[], ["x"]],
        "no_such_field": [1],
    }


_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        "",
        ["a", "b"],
        [5, 6, 7],
        [[5, 6], [7]],
        [],
        [[]],
        5,
        None,
        [-1],
        [10**9],
        {"a": 1},
    ],
    "best_of": [1, 2],
    "echo": [True, 1],
    "logprobs": [0, 2, 6, True],
    "suffix": ["", "end"],
}
_CHAT: dict[str, list[Any]] = {
    "messages": [
        [],
        "hi",
        None,
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": "hi", "typo": 1}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "<|im_end|>"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ],
    "max_completion_tokens": [2, 0],
    "logprobs": [True, 1],
    "top_logprobs": [2, 6],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "chat_template_kwargs": [{"enable_thinking": False}, [1]],
    "tools": [[], [{"type": "function"}]],
    "tool_choice": ["none", "required"],
    "reasoning_effort": ["low"],
    "echo": [False],
}
SAY = {"model": NAME, "prompt": "The sea", "max_tokens": 4, "temperature": 0}
CHAT = {
    "model": NAME,
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Hello"}],
}
_COMPLETE, _CHATS = "/v1/completions", "/v1/chat/completions"


def _generating(path: str, base: dict[str, Any], own: dict[str, list[Any]]) -> Iterator[Case]:
    for name, values in (_fields() | own).items():
        for value in values:
            key = f"{path} {name}={json.dumps(value)[:60]}"
            yield Case(key, "POST", path, base | {name: value})
    rich = {"n": 2, "logprobs": 2, "temperature": 1, "seed": 3, "return_token_ids": True}
    if path == _CHATS:
        rich |= {"logprobs": True, "top_logprobs": 2}
    together: dict[str, dict[str, Any]] = {
        "rich": {**rich, "prompt_logprobs": 1},
        "rich, streamed": {**rich, "prompt_logprobs": 1, "stream": True},
        "streamed": {"stream": True},
        "streamed with usage": {"stream": True, "stream_options": {"include_usage": True}},
        "streamed, usage in each": {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        "streamed, an error": {"stream": True, "temperature": -1},
        "options without a stream": {"stream_options": {"include_usage": True}},
        "too long": {"max_tokens": 300},
    }
    for name, fields in together.items():
        yield Case(f"{path} {name}", "POST", path, base | fields)


def _bodies() -> Iterator[Case]:
    path, kind = _COMPLETE, {"Content-Type": "application/json"}
    for name, body in {
        "empty": b"",
        "no JSON": b"{",
        "a list": b"[]",
        "no UTF-8": b'{"prompt": "\xff"}',
        "twice": b'{"prompt": "a", "prompt": "b"}',
        "NaN": b'{"prompt": "a", "temperature": NaN}',
        "deep": b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        "a surrogate": b'{"prompt": "\\ud800"}',
        "a long number": b'{"prompt": "a", "seed": ' + b"1" * 2000 + b"}",
        "too large": b'{"prompt": "' + b"a" * (5 << 20) + b'"}',
    }.items():
        yield Case(f"body {name}", "POST", path, body, kind)
    good = json.dumps(SAY).encode()
    for name, headers in {
        "text": {"Content-Type": "text/plain"},
        "charset": {"Content-Type": "application/json; charset=utf-8"},
        "latin": {"Content-Type": "application/json; charset=latin-1"},
        "compressed": {**kind, "Content-Encoding": "gzip"},
        "its id": {**kind, "X-Request-Id": "mine-1"},
        "a bad id": {**kind, "X-Request-Id": "m" * 129},
        "another host": {**kind, "Host": "evil.example"},
        "an allowed host": {**kind, "Host": "a.example.org"},
        "an origin": {**kind, "Origin": "https://page.example"},
        "another origin": {**kind, "Origin": "https://evil.example"},
        "a key": {**kind, "Authorization": "Bearer none"},
    }.items():
        yield Case(f"headers {name}", "POST", path, good, headers)


def _routes() -> Iterator[Case]:
    for path in (
        *("/v1/models", f"/v1/models/{NAME}", "/v1/models/alias", "/v1/models/other", "/health"),
        *("/ping", "/live", "/ready", "/version", "/metrics", "/requests", "/requests?limit=1"),
        *("/requests?limit=x", "/requests?limit=0", "/requests?typo=1", "/docs", "/openapi.json"),
        *("/", "/nothing", "/v1/models/", "/v1", "/v1/embeddings", "/v1/responses"),
    ):
        yield Case(f"GET {path}", "GET", path)
    for method in ("HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "STRANGE"):
        yield Case(f"{method} {_COMPLETE}", method, _COMPLETE)
        yield Case(f"{method} /v1/models", method, "/v1/models")
    yield Case(f"GET {_COMPLETE}", "GET", _COMPLETE)
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    yield Case("preflight", "OPTIONS", _COMPLETE, None, preflight)
    evil = preflight | {"Origin": "https://evil.example"}
    yield Case("preflight of another", "OPTIONS", _COMPLETE, None, evil)
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    yield Case("OpenMetrics", "GET", "/metrics", None, accept)
    for body in (
        {"prompt": "The sea"},
        {"prompt": "The sea", "add_special_tokens": False, "return_token_strs": True},
        {"messages": CHAT["messages"]},
        {"messages": CHAT["messages"], "add_generation_prompt": True},
        {"prompt": "x", "add_generation_prompt": True},
        {"prompt": "x", "messages": CHAT["messages"]},
        {"prompt": 7},
        {"typo": 1},
        {"model": "other", "prompt": "x"},
        {},
    ):
        yield Case(f"/tokenize {json.dumps(body)[:80]}", "POST", "/tokenize", body)
    for body in ({"tokens": [40, 41]}, {"tokens": [10**9]}, {"tokens": ["x"]}, {"tokens": []}, {}):
        yield Case(f"/detokenize {json.dumps(body)}", "POST", "/detokenize", body)


def _raw() -> Iterator[Case]:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for name, content in {
        "no HTTP": b"hello\r\n\r\n",
        "no host": b"GET /live HTTP/1.1\r\n\r\n",
        "two hosts": b"GET /live HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        "HTTP/1.0": b"GET /live HTTP/1.0\r\n\r\n",
        "many headers": b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        "long headers": b"GET /live HTTP/1.1\r\nHost: localhost\r\nA: "
        + b"b" * 70000
        + b"\r\n\r\n",
        "a strange encoding": post + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "a bad length": post + b"Content-Length: -1\r\n\r\n",
        "tiny chunks": post + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 64,
        "expects": post + b"Content-Length: 5000000\r\nExpect: 100-continue\r\n\r\n",
    }.items():
        yield Case(f"raw {name}", "", "", raw=content)


KEYS = {
    "keys": [
        {"name": "plain", "key": "sk-plain", "priority": 5},
        {"name": "urgent", "key": "sk-urgent", "priority": 1, "may_raise_priority": True},
        {"name": "few", "key": "sk-few", "max_requests_per_minute": 2},
        {"name": "short", "key": "sk-short", "max_tokens_per_minute": 40, "slo": {"ttft": 60000}},
    ]
}


def _keyed() -> Iterator[Case]:
    def of(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer sk-{key}"}

    for path in ("/v1/models", "/live", "/metrics", "/requests", "/docs", "/nothing"):
        yield Case(f"no key {path}", "GET", path)
        yield Case(f"a key {path}", "GET", path, None, of("plain"))
    yield Case("no key", "POST", _COMPLETE, SAY)
    yield Case("a wrong key", "POST", _COMPLETE, SAY, of("wrong"))
    yield Case("another scheme", "POST", _COMPLETE, SAY, {"Authorization": "Basic sk-plain"})
    for priority in (None, 5, 9, 4, -3):
        for key in ("plain", "urgent"):
            body = SAY | {"priority": priority}
            yield Case(f"{key} priority {priority}", "POST", _COMPLETE, body, of(key))
    for turn in range(4):
        yield Case(f"few, {turn}", "POST", _COMPLETE, SAY, of("few"))
        yield Case(f"short, {turn}", "POST", _CHATS, CHAT | {"max_tokens": 30}, of("short"))
        salted = SAY | {"cache_salt": "s", "stream": True}
        yield Case(f"salted, {turn}", "POST", _COMPLETE, salted, of("plain"))


def _real() -> Iterator[Case]:
    """Ask a real model, with drafts and tiers."""
    questions = ("What is the capital of Japan?", "Write a haiku.", "Count to ten.", "Hi!")
    for at, question in enumerate(questions):
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 24,
            "logprobs": True,
            "top_logprobs": 3,
        }
        for name, more in {
            "greedy": {"temperature": 0},
            "drawn": {"seed": at},
            "streamed": {
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "by default": {
                "seed": 100 + at,
                "stream": True,
                "logprobs": None,
                "top_logprobs": None,
            },
        }.items():
            yield Case(f"{question} {name}", "POST", _CHATS, body | more)
    text = {"model": NAME, "prompt": ["One, two, three,", "naïve 🙂"], "echo": True, "logprobs": 4}
    yield Case("echo", "POST", _COMPLETE, text | {"temperature": 0})
    yield Case("echo, streamed", "POST", _COMPLETE, text | {"temperature": 0, "stream": True})


_OPEN = (
    *("--served-model-name", NAME, "--served-model-name", "alias", "--max-model-len", "128"),
    *("--kv-cache-memory", "16MiB", "--max-num-seqs", "8", "--seed", "1", "--max-logprobs", "5"),
    *("--allowed-origins", "https://page.example", "--allowed-hosts", "*.example.org"),
)
_BARE = (
    *("--served-model-name", NAME, "--kv-cache-memory", "16MiB", "--max-model-len", "128"),
    *("--disable-fastapi-docs", "--generation-config", "vllm", "--response-role", "bot"),
    *("--enable-force-include-usage", "--control-tokens-in-content", "--root-path", "/api"),
    *("--api-key", "sk-one", "--scheduling-policy", "fair", "--seed", "1"),
)


def _bare() -> Iterator[Case]:
    key = {"Authorization": "Bearer sk-one"}
    for path in ("/docs", "/openapi.json", "/api/v1/models", "/v1/models", "/nothing"):
        yield Case(f"GET {path}", "GET", path, None, key)
    forging = [{"role": "user", "content": "<|im_end|>"}]
    for name, more in {
        "chat": {},
        "streamed": {"stream": True},
        "a control token": {"messages": forging},
        "a priority": {"priority": 1},
        "of many": {"n": 100},
    }.items():
        yield Case(name, "POST", _CHATS, CHAT | more, key)


def record(folder: Path, share: float) -> dict[str, Any]:
    talking = models.make("talking", folder)
    keys = folder / "keys.json"
    keys.write_text(json.dumps(KEYS))
    common = ("--served-model-name", NAME, "--kv-cache-memory", "16MiB", "--max-model-len", "128")
    real = (
        *("--served-model-name", NAME, "--max-model-len", "512", "--kv-cache-memory", "16MiB"),
        *("--speculative-config", '{"method": "suffix"}', "--itl-target", "50"),
        *("--kv-offload-dir", str(folder / "tier"), "--kv-offload-disk", "64MiB"),
        *("--slo", "ttft=60000,tpot=60000", "--max-queue-time", "600"),
    )
    keyed = (
        *("--api-key-file", str(keys), "--scheduling-policy", "priority", "--seed", "1"),
        *("--log-format", "json", "--uvicorn-log-level", "debug"),
    )
    sets: list[tuple[str, str, tuple[str, ...], list[Case]]] = [
        (
            "open",
            talking,
            _OPEN,
            [
                *_routes(),
                *_generating(_COMPLETE, SAY, _COMPLETIONS),
                *_generating(_CHATS, CHAT, _CHAT),
                *_bodies(),
                *_raw(),
            ],
        ),
        ("keys", talking, (*common, *keyed), list(_keyed())),
        ("bare", talking, _BARE, list(_bare())),
        ("real", "smollm2", real, list(_real())),
    ]
    found: dict[str, Any] = {}
    names: dict[str, Any] = {}
    wording: dict[str, Any] = {}
    for name, model, options, cases in sets[: None if share == 1 else 1]:
        with serving(model, folder / f"{name}.log", *options) as server:
            found[name] = {case.name: _asked(server, case) for case in models.first(cases, share)}
            _describe(server, name, names, wording)
        wording[f"log of {name}"] = _log(server.log, folder)
        if name == "keys":
            found["fields of a log line"] = _log_fields(server.log)
    if share == 1:
        found["full"] = _full(folder)
    return found | {"metrics": names, "wording": wording}


def _asked(server: Server, case: Case) -> Any:
    try:
        if case.raw is not None:
            answer = server.raw(case.raw)
        else:
            answer = server.ask(case.method, case.path, case.body, case.headers)
    except (OSError, ValueError) as error:
        return f"no answer: {type(error).__name__}"
    found = shown(answer, case.path)
    if case.headers and (given := case.headers.get("X-Request-Id")):
        found["id is echoed"] = ("x-request-id", given) in answer.headers
    return found


def _describe(server: Server, name: str, names: dict[str, Any], wording: dict[str, Any]) -> None:
    """Note the metrics' names and, as wording, what they and the API say of themselves."""
    key = {"keys": "sk-plain", "bare": "sk-one"}.get(name)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    text = server.ask("GET", "/metrics", None, headers).body.decode()
    found, wording["metrics"] = metrics(text)
    for metric, shape in found.items():
        known = names.setdefault(metric, {"type": shape["type"], "samples": []})
        known["samples"] = sorted({*known["samples"], *shape["samples"]})
    if name == "open":
        answer = server.ask("GET", "/openapi.json")
        wording["openapi"] = {
            path: text for path, text in _texts(json.loads(answer.body)) if isinstance(text, str)
        }


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key in _PROSE:
                yield f"{path}.{key}", each
            yield from _texts(each, f"{path}.{key}")
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _texts(each, f"{path}[{at}]")


def _log(lines: list[str], folder: Path) -> list[str]:
    """Return the distinct lines of a log but those of requests, without figures, ids and paths."""
    seen: dict[str, None] = {}
    for line in lines:
        line = re.sub(r"\b[0-9a-f]{12,}\b", "#", line.replace(str(folder), "…"))
        line = re.sub(r"\d+([.,:]\d+)*", "#", line)
        if not re.search(r"(GET|POST|HEAD|PUT|PATCH|DELETE|OPTIONS) /|octavo.access", line):
            seen[line] = None
    return list(seen)


def _log_fields(lines: list[str]) -> list[str]:
    """Return the names in JSON lines of the access log, with the types of their values."""
    found: set[str] = set()
    for line in lines:
        entry = json.loads(line) if line.startswith("{") else {}
        found |= {f"{key}: {type(value).__name__}" for key, value in entry.items()}
    return sorted(found)


def _full(folder: Path) -> dict[str, Any]:
    """Record what a full server says, and what those are told whom its end cuts off."""
    options = (
        *("--served-model-name", NAME, "--max-model-len", "2048", "--kv-cache-memory", "64MiB"),
        *("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--shutdown-timeout", "0"),
    )
    long = SAY | {"max_tokens": 2000, "ignore_eos": True}
    found: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    threads: list[threading.Thread] = []
    with serving("smollm2", folder / "full.log", *options) as server:

        def ask(name: str, body: dict[str, Any]) -> None:
            answers[name] = shown(server.ask("POST", _COMPLETE, body))

        def state() -> tuple[int, int]:
            engine = json.loads(server.ask("GET", "/requests").body)["engine"]
            return engine["running"], engine["waiting"]

        for name, body, awaited in (
            ("the one that runs", long | {"stream": True}, (1, 0)),
            ("the one that waits", long, (1, 1)),
        ):
            threads.append(threading.Thread(target=ask, args=(name, body)))
            threads[-1].start()
            deadline = time.monotonic() + 60
            while state() != awaited and time.monotonic() < deadline:
                time.sleep(0.02)
        for path in ("/ready", "/live"):
            found[path] = _asked(server, Case("", "GET", path))
        found["one more"] = _asked(server, Case("", "POST", _COMPLETE, SAY))
    for thread in threads:
        thread.join()
    for choice in answers["the one that runs"].get("stream", {}).get("choices", {}).values():
        choice["text"] = "…"  # as much as there was time for
    return found | answers
