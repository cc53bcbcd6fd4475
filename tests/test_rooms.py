"""Imports between rooms run one way, as docs/architecture.md says."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent

# What each room may import from; `engine/clock.py` and the like are reached through their room.
# None of these may import from `tools`.
ENGINE: dict[str, set[str]] = {
    "models": set(),
    "loader": {"models", "strict_json", "_native"},
    "machine": {"executor.cost", "loader", "_native"},
    "kv_cache": {"models"},
    "sampling": {"_native"},
    "scheduler": {"kv_cache", "models", "sampling", "executor.base"},
    "executor": {"kv_cache", "models", "loader", "machine", "sampling", "_native"},
    "spec_decode": {
        *("scheduler", "sampling", "executor", "kv_cache", "models", "loader", "strict_json")
    },
    "engine": {
        *("scheduler", "spec_decode", "sampling", "executor", "kv_cache", "models", "loader"),
        *("machine", "_native"),
    },
    "server": {"engine", "scheduler", "sampling", "kv_cache.connectors", "loader", "machine"},
}
BELOW = {
    *("engine", "scheduler", "spec_decode", "sampling", "executor", "kv_cache", "models"),
    *("loader", "machine", "_native"),
}
TOOLS: dict[str, set[str]] = {
    "tools.verify": BELOW,
    "tools.quantize": {"executor", "kv_cache", "models", "loader", "machine", "_native"},
    "tools.workload": {"strict_json"},
    "tools.plan": BELOW | {"tools.workload"},
    "tools.train": BELOW | {"tools.quantize"},
    "tools.top": {"engine.snapshot", "scheduler.request", "tools.bench.load"},
    "tools.bench": BELOW | {"tools.workload", "tools.quantize"},
}
ALLOWED = ENGINE | TOOLS
ALLOWED["cli"] = {*ALLOWED, "llm", "strict_json"}
for _allowed in ALLOWED.values():
    _allowed |= {"settings", "words", "extras"}


def test_no_room_is_left_out() -> None:
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"tools"}
    found |= {f"tools.{path.parent.name}" for path in PACKAGE.glob("tools/*/__init__.py")}
    assert found == set(ALLOWED)


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, as dotted names below ``octavo``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "octavo":
                names = [f"octavo.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("octavo.") for name in names if name.startswith("octavo.")}
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_from_rooms_below_it(room: str) -> None:
    allowed = ALLOWED[room] | {room}
    for path in sorted((PACKAGE / room.replace(".", "/")).rglob("*.py")):
        for name in imports(path):
            if name.startswith("__"):
                continue
            parts = name.split(".")
            assert any(".".join(parts[:depth]) in allowed for depth in (1, 2, 3)), (
                f"{path.relative_to(PACKAGE)} imports octavo.{name}"
            )


@pytest.mark.parametrize("room", ["kv_cache", "scheduler"])
def test_cache_and_scheduler_import_nothing_heavy(room: str) -> None:
    modules = [
        f"octavo.{room}.{path.stem}"
        for path in (PACKAGE / room).glob("*.py")
        if path.stem != "__init__"
    ]
    script = (
        f"import importlib, sys\n[importlib.import_module(m) for m in {modules!r}]\n"
        "print([m for m in ('octavo._native', 'tokenizers', 'fastapi', 'jinja2', 'typer', 'rich',"
        " 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_importing_the_engine_imports_no_tool_http_or_plotting_module() -> None:
    modules = [
        *("octavo.llm", "octavo.engine.engine", "octavo.engine.async_engine", "octavo.engine.load"),
        *("octavo.engine.calibration", "octavo.scheduler.scheduler", "octavo.kv_cache.cache"),
        *("octavo.executor.native.executor", "octavo.sampling.native", "octavo.models.families"),
        *("octavo.spec_decode.speculator", "octavo.spec_decode.draft_model"),
    ]
    forbidden = (
        *("octavo.tools.", "octavo.server.", "octavo.cli.", "starlette.", "uvicorn.", "httpx."),
        *("matplotlib.", "typer.", "rich."),
    )
    script = (
        f"import importlib, sys\n[importlib.import_module(m) for m in {modules!r}]\n"
        f"print([m for m in sys.modules if (m + '.').startswith({forbidden})])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# Names that may occur more than once. A command's module (cli/) has the command's name.
REPEATED_MODULES = {"__init__", "base", "config"}


def duplicates() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The modules and the public classes whose names occur more than once, with their files."""
    modules, classes = defaultdict(list), defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith("cli/") and path.stem not in REPEATED_MODULES:
            modules[path.stem].append(file)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(file)
    found = [{name: at for name, at in each.items() if len(at) > 1} for each in (modules, classes)]
    return found[0], found[1]


def test_no_two_modules_and_no_two_classes_have_one_name() -> None:
    modules, classes = duplicates()
    assert not modules
    assert not classes
