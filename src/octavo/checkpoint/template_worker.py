"""The process in which a model's chat template runs; started by `octavo.checkpoint.chat_template`.

It is run as a file and imports nothing of octavo. File descriptor 0 is a socket to the parent.
Frames both ways are a 4-byte length and JSON: first {"source", "limits"}, answered with {}, then
the variables of each rendering, answered with {"text"} or {"error"}. The stream's end ends it.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
from datetime import datetime
from struct import Struct
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = Struct("<I")


def main() -> None:
    # The terminal's Ctrl-C and a supervisor's SIGTERM are for the parent, whose end ends this too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = socket.socket(fileno=0).makefile("rwb")
    hello = receive(channel)
    if hello is None:
        return
    limits = hello["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    send(channel, {})
    template: jinja2.Template | None = None
    while (variables := receive(channel)) is not None:
        # The parent kills what runs too long; should the parent be gone, this does.
        spent = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(spent.ru_utime + spent.ru_stime + limits["seconds"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        try:
            # Inside the limits: compiling evaluates constant expressions.
            template = template or environment().from_string(hello["source"])
            answer = {"text": rendered(template, variables, limits["characters"])}
        except jinja2.TemplateSyntaxError as error:
            answer = {"error": f"line {error.lineno} of the template: {error.message}"}
        except jinja2.TemplateError as error:  # also what raise_exception raises
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": f"the template needs more than {limits['memory'] >> 20} MB"}
        except RecursionError:
            answer = {"error": "the template recurses without end"}
        except Exception as error:
            answer = {"error": f"the template failed: {type(error).__name__}: {error}"}
        send(channel, answer)


def receive(channel: Any) -> dict[str, Any] | None:
    header = channel.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(channel.read(*LENGTH.unpack(header)))
    return message


def send(channel: Any, message: dict[str, str]) -> None:
    data = json.dumps(message).encode()
    channel.write(LENGTH.pack(len(data)) + data)
    channel.flush()


def rendered(template: jinja2.Template, variables: dict[str, Any], limit: int) -> str:
    parts, size = [], 0
    for part in template.generate(variables):
        size += len(part)
        if size > limit:
            raise ValueError(f"its text is longer than {limit} characters")
        parts.append(part)
    text = "".join(parts)
    text.encode()  # lone surrogates, which no tokenizer takes
    return text


def environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Generation(Extension):
    """``{% generation %}`` marks text for training and is nothing here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


if __name__ == "__main__":
    main()
