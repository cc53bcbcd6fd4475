"""The process in which a model's chat template runs; started by `octavo.loader.chat_template`.

The hello is {"source", "tokens", "limits"}. A request is {"variables", "messages", "check"} and
answered with {"text", "origin"} or {"error"}; one with "check" only compiles the template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from octavo.loader import apart_worker, template_text
from octavo.loader.template_text import Text

Json = dict[str, Any]


def main() -> None:
    apart_worker.serve(prepare, "template")


def prepare(hello: Json) -> Callable[[Json], Json]:
    compiled: list[jinja2.Template] = []
    tokens = {name: template_text.written(text) for name, text in hello["tokens"].items()}

    def answer(request: Json) -> Json:
        try:
            if not compiled:  # inside the limits: compiling evaluates constant expressions
                compiled.append(environment().from_string(hello["source"]))
            if request.get("check"):
                return {}
            variables = {
                **tokens,
                **template_text.content(request["variables"]),
                "messages": [template_text.message(each) for each in request["messages"]],
            }
            text = rendered(compiled[0], variables, hello["limits"]["characters"])
            return {"text": text, "origin": template_text.runs(template_text.origin_of(text))}
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno} of the template: {error.message}"}
        except jinja2.TemplateError as error:  # also what raise_exception raises
            return {"error": str(error)}

    return answer


def rendered(template: jinja2.Template, variables: Json, limit: int) -> str:
    parts, size = [], 0
    for part in template.generate(variables):
        size += len(part)
        if size > limit:
            raise ValueError(f"its text is longer than {limit} characters")
        parts.append(part)
    text = template_text.joined(parts)
    text.encode()  # lone surrogates, which no tokenizer takes
    return text


class Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers' `apply_chat_template` (utils/chat_template_utils.py of
    transformers 5.24), with `Text` for the template's own strings."""

    concat = staticmethod(template_text.joined)
    constant = staticmethod(template_text.constant)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        self.code_generator_class = Generator
        self.filters = {name: followed(each) for name, each in self.filters.items()}
        self.filters["tojson"] = tojson
        self.filters["join"] = join
        self.filters["safe"] = template_text.safe
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = super().call(context, function, *args, **kwargs)
        if type(result) is str:
            return template_text.like(getattr(function, "__self__", None), result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        call = super().wrap_str_format(value)
        if call is None or value.__name__ != "format" or not isinstance(value.__self__, Text):
            return call

        def tracked(*args: Any, **kwargs: Any) -> str:
            return template_text.formatted(value.__self__, call(*args, **kwargs), args, kwargs)

        return tracked


def followed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter: what it makes of content is content."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if type(result) is not str:
            return result
        return template_text.like(next((x for x in args if isinstance(x, str)), None), result)

    return call


def environment() -> Environment:
    return Environment()


class Generator(CodeGenerator):
    """Marks the template's own strings in the code that it makes of a template."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if type(value) in (str, list, tuple, dict):  # Markup is no such string
            self.write(f"environment.constant({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.constant({node.data!r})")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.constant({super()._output_const_repr(group)})"

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


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


@jinja2.pass_eval_context
def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
    """Jinja's own, whose default separator is no `Text`."""
    return FILTERS["join"](context, value, d if isinstance(d, Text) else Text(str(d)), attribute)


class TemplateDict:
    """`dict` without what leads from a class to Python's insides."""

    def __call__(self, *args: Any, **kwargs: Any) -> Json:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> Json:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        # As Jinja has it, so that a namespace may have a `self`.
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _no_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _no_underscore(name)
        super().__setitem__(name, value)


def _no_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


class Generation(Extension):
    """``{% generation %}`` marks text for training and is nothing here but a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_as_it_is")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()
