"""Options that several commands share, each said once; names are vLLM's where it has one."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from octavo.cli.values import METAVARS
from octavo.engine.config import EngineConfig, SettingsError
from octavo.scheduler.policies.config import PolicyConfig
from octavo.server.config import ServeConfig
from octavo.settings import setting_infos
from octavo.strict_json import once

Model = Annotated[
    str,
    typer.Argument(
        help="A known name (octavo pull --list), a GGUF file or its folder, or a Hugging Face id "
        "(org/repo or org/repo:file.gguf).",
        show_default=False,
        metavar="MODEL",
    ),
]

PlannedModel = Annotated[
    str,
    typer.Argument(
        help="A preset (llama-3-8b, qwen2.5-7b, …; an unknown name lists them), a config.json, or "
        "what octavo serve takes: a known name, a GGUF file or folder, a Hugging Face id.",
        show_default=False,
        metavar="MODEL",
    ),
]


_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def words(text: str) -> str:
    """Text for a model: what the shell gave, if it is text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"it is not UTF-8, from character {error.start + 1}") from None
    return text


def amount(text: str) -> int:
    """A count or size: 4096, 1k = 1000, 1K = 1Ki = 1KiB = 1024, 2GiB, 512MB = 512·10⁶.

    As in vLLM a small letter is decimal and a capital one binary; "…B" says bytes: KB is decimal.
    """
    match = re.fullmatch(
        r"([0-9]{1,20}(?:\.[0-9]{1,18})?)\s*(?:([kKmMgGtT])(i?)(B?))?", text.strip()
    )
    if not match or ("." in match[1] and match[2] is None):
        raise typer.BadParameter(f"{text!r} is not a size such as 4096, 8K, 512MiB or 4GiB")
    number, letter, binary, byte = match.groups()
    if letter is None:
        factor = 1
    elif binary or (letter.isupper() and not byte):
        factor = 1 << (10 * (1 + "kmgt".index(letter.lower())))
    else:
        factor = _SUFFIXES[letter.lower()]
    return int(float(number) * factor) if "." in number else int(number) * factor


def length(text: str) -> int:
    """A number of tokens, at least one."""
    if (tokens := amount(text)) < 1:
        raise typer.BadParameter(f"a length is at least one token, not {tokens}")
    return tokens


def max_model_len(text: str) -> int | None:
    return None if text == "auto" else amount(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{text[:200]!r} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{text[:200]!r} is not a JSON object")
    return given


def instruction_set(text: str) -> str:
    """The name of a tier that runs here."""
    from octavo.executor.native.packing import check_isa

    try:
        check_isa(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def id_list(text: str) -> tuple[int, ...]:
    """Token ids: "1,2,3"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of token ids such as 1,2,3") from None


def id_bias(text: str) -> tuple[int, float]:
    """One bias: "ID=VALUE"."""
    token_id, equals, value = text.partition("=")
    try:
        if equals:
            return int(token_id), float(value)
    except ValueError:
        pass
    raise typer.BadParameter(f"{text!r} is not ID=VALUE, such as 314=-100")


def strings(values: list[str]) -> tuple[str, ...]:
    """An option given several times, or once as a JSON list (vLLM's way)."""
    flat: list[str] = []
    for value in values:
        if not value.startswith("["):
            flat.append(value)
            continue
        try:
            items = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise typer.BadParameter(f"{value[:200]!r} is not a JSON list: {error}") from None
        if not all(isinstance(item, str) for item in items):
            raise typer.BadParameter(f"{value[:200]!r} is not a list of strings")
        flat += items
    return tuple(flat)


def check_file(path: Path, suffix: str | None = None) -> None:
    """That a plot, or a file of this suffix ("": of any), can be written there, before anything is
    computed. Raises `SettingsError`.
    """
    from octavo.engine.config import SettingsError
    from octavo.tools.quantize.plot import PlotError, check_suffix

    try:
        if suffix is None:
            check_suffix(path)
        elif suffix and path.suffix != suffix:
            raise PlotError(f"{path}: not a file of {suffix}")
    except PlotError as error:
        raise SettingsError(str(error)) from None
    if path.is_dir():
        raise SettingsError(f"{path}: is a folder")
    if not path.parent.is_dir():
        raise SettingsError(f"{path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingsError(f"{path}: may not be written")


def check_folder(path: Path) -> None:
    """That files can be written there, where the folder is or will be. Raises `SettingsError`."""
    path = path.absolute()
    place = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not place.is_dir():
        raise SettingsError(f"{place}: is no folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise SettingsError(f"{place}: may not be written")


def option(
    name: str, kind: Any, default: Any, help: str, panel: str, *flags: str, **more: Any
) -> inspect.Parameter:
    """One option of a group, as a parameter of a command's signature."""
    base = next(iter(get_args(kind)), kind)  # of int | None, list[str]
    more.setdefault("metavar", METAVARS.get(base))
    info = typer.Option(*flags, help=help, rich_help_panel=panel, **more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


Group = tuple[list[inspect.Parameter], Callable[[Mapping[str, Any]], Any]]


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command groups of options: of each, (parameters, build), it receives what ``build``
    makes of the values, under the group's name.

    A `ValueError` of ``build`` is a wrong use of the command (exit code 2).
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [
            parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY,
                annotation=eval(parameter.annotation, command.__globals__),
            )
            for parameter in signature.parameters.values()
            if parameter.name not in groups
        ]
        for options, _ in groups.values():
            parameters += options

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, (options, build) in groups.items():
                given = {parameter.name: values.pop(parameter.name) for parameter in options}
                with naming_flags(*given):
                    values[name] = build(given)
            command(**values)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


# --- the engine ----------------------------------------------------------------------------------

MOST_SEQUENCES = setting_infos(EngineConfig)["max_num_seqs"].keywords["max"]  # and users of a plan


def named_flags(message: str, *options: str) -> str:
    """An error of the engine's rooms, in which its settings and these options have the names of
    their flags. A request's own, and names of one word, are where the message begins with them.
    """

    def flag(match: re.Match[str]) -> str:
        name = _OTHER_NAMES.get(match[0], match[0])
        first = match.start() == 0 and _SAYS.match(message, match.end())
        known = "_" in name and (name in _SETTINGS or name in options)
        if known or (first and (name in options or name in _SETTINGS | _SAMPLED)):
            return f"--{name.replace('_', '-')}"
        return match[0]

    return _NAME.sub(flag, message)


@contextmanager
def naming_flags(*options: str) -> Iterator[None]:
    """What the engine's rooms refuse (`ValueError`) is a mistake in the options, by their names."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(named_flags(str(error), *options)) from None


# What reads the text of an option whose type does not say it.
_PARSERS: dict[str, Callable[[str], Any]] = {
    each.__name__: each for each in (amount, max_model_len, json_object, instruction_set)
}
_KINDS = {"bool": bool, "int": int, "float": float, "Path": Path, "tuple[str, ...]": list[str]}


def setting_options(
    config: type[Any], panel: str, names: Iterable[str], *, unset: bool = False
) -> list[inspect.Parameter]:
    """Return the options of the settings ``names`` (octavo/settings.py). ``unset``: one that is not
    given is None, for what the config says, which the help shows.
    """
    made = []
    by_name = {each.name: each for each in fields(config)}
    for name in names:
        info = setting_infos(config)[name]
        default: Any = by_name[name].default
        base, _, may_be_none = str(by_name[name].type).partition(" | ")
        kind: Any = str if info.parse else _KINDS.get(base, str)
        more = dict(info.keywords)
        flags = info.flags
        if info.parse:
            more["parser"] = _PARSERS[info.parse]
        if unset:
            shown = ("off", "on")[default] if kind is bool else str(default)
            more.setdefault("show_default", shown)
            default = None
        elif info.name.startswith("disable_"):
            default, flags = not default, (f"--{info.name.replace('_', '-')}",)
        elif kind == list[str]:
            default = list(default)
        if unset or may_be_none:
            kind = kind | None
        made.append(option(info.name or name, kind, default, info.help, panel, *flags, **more))
    return made


ENGINE_OPTIONS = setting_options(
    EngineConfig,
    "Engine",
    (
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"),
        *("memory_utilization", "kv_cache_dtype", "quantization", "block_size"),
        *("enable_prefix_caching", "state_snapshots", "threads", "speculative_config", "isa"),
    ),
    unset=True,
)
# Commands that run many requests at once have these.
POLICY_OPTIONS = setting_options(
    EngineConfig,
    "Who goes first",
    ("itl_target", *(each.name for each in fields(PolicyConfig))),
    unset=True,
)
QUEUE_OPTIONS = setting_options(
    EngineConfig,
    "Engine",
    ("max_num_queued_reqs", "max_num_queued_tokens", "max_logprobs", "seed"),
    unset=True,
)


def engine_config(given: Mapping[str, Any]) -> Any:
    """`EngineConfig` with its own defaults for what was not given."""
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def engine_flags(config: Any) -> list[str]:
    """The options that give this `EngineConfig`; those a plan is about are said even where they are
    the default.
    """
    said = ("max_num_seqs", "max_num_batched_tokens")
    flags: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if value == field.default and field.name not in said:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif field.name == "speculative_config":
            given = {f.name: getattr(value, f.name) for f in fields(value)}
            default = {f.name: f.default for f in fields(value)}
            flags += [flag, json.dumps({k: v for k, v in given.items() if v != default[k]})]
        else:
            flags += [flag, str(value)]
    return flags


LIMITS_HELP = (
    "Take the limits of the last octavo bench machine instead of measuring them before and after."
)


# --- sampling ------------------------------------------------------------------------------------

_SAMPLING = "Sampling"
_API_ONLY = ("n", "logprobs", "prompt_logprobs")
_LARGEST_VOCABULARY = 2**31


def sampling_options(
    *,
    max_tokens: int | None,
    max_tokens_help: str,
    temperature: float = 1.0,
    min_p: float = 0.0,
) -> list[inspect.Parameter]:
    """An option for each sampling parameter (sampling/params.py) but those of the API alone. The
    arguments are the command's own defaults.
    """
    from octavo.sampling.params import SamplingParams, parameters

    defaults = SamplingParams(max_tokens=max_tokens, temperature=temperature, min_p=min_p)
    made = []
    for name, row in parameters().items():
        if name in _API_ONLY:
            continue
        kind, default = row.kind.http_type, getattr(defaults, name)
        more: dict[str, Any] = {}
        if name == "max_tokens":
            more = {"show_default": max_tokens_help}
        elif name == "seed":
            kind, more = int | None, {"show_default": "random"}
        elif name == "stop":
            kind, default = list[str], []
        elif name == "logit_bias":
            kind, default = list[str], []
            more = {"parser": id_bias, "metavar": "ID=VALUE"}
        elif kind == list[int]:
            kind, default = str | None, None
            more = {"parser": id_list, "metavar": "IDS"}
        made.append(option(name, kind, default, row.help, _SAMPLING, **more))
    return made


def sampling_params(given: Mapping[str, Any]) -> Any:
    """`SamplingParams`, checked as far as may be without the model."""
    from octavo.sampling.params import SamplingParams

    values = dict(given)
    values["stop"] = tuple(values["stop"])
    values["logit_bias"] = dict(values["logit_bias"])
    values["stop_token_ids"] = values["stop_token_ids"] or ()
    values["banned_token_ids"] = values["banned_token_ids"] or ()
    params = SamplingParams(**values)
    params.validated(_LARGEST_VOCABULARY, EngineConfig().max_logprobs)
    return params


# --- what messages call them ---------------------------------------------------------------------

_SETTINGS = {each.name for each in fields(EngineConfig)}
_SAMPLED = {each.name for each in sampling_options(max_tokens=None, max_tokens_help="")}
_SAMPLED |= {"n", "logprobs", "prompt_logprobs"}
_OTHER_NAMES = {
    name: info.name
    for name, info in setting_infos(ServeConfig).items()
    if info.name and not info.name.startswith("disable_")
}
_NAME = re.compile(r"(?<![\w./-])[a-z][a-z_]*(?![\w/]|\.\w)")  # not of a path
_SAYS = re.compile(r" (?:'[^']*' )?(?:is|contains|has) ")
