"""Mutation testing: a seeded sample of small changes to the code, each of which a test must notice.

    python tests/mutants.py [ROOM …] [--sample 150] [--seed 0] [--workers 2] [--json FILE]

Each mutant (made by cosmic-ray's operators) is one changed operator, number, comparison, branch or
decorator. The room's tests run on a copy of the tree that has the change, in the order given below,
and stop at the first failure. A mutant that no test notices has survived: it is printed as a diff
and wants a test, or code that is not needed is removed, or `EQUIVALENT` gets the reason why it
changes nothing that anybody could see. Exits with 1 if more than a tenth survive in a room.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db

ROOT = Path(__file__).parents[1]
MOST_SURVIVORS = 0.1  # of a room's sample


class Room(NamedTuple):
    files: tuple[str, ...]  # below src/octavo: files or folders
    tests: tuple[str, ...]  # below tests, the quickest to notice first


ROOMS = {
    "scheduler": Room(
        ("scheduler",),
        (
            *("scheduler", "engine/test_engine.py", "engine/test_wait_time.py"),
            *("engine/test_connectors.py", "engine/test_trees.py"),
            *("engine/test_lives.py", "engine/test_leap.py"),
        ),
    ),
    "kv_cache": Room(
        ("kv_cache",), ("kv_cache", "engine/test_connectors.py", "engine/test_lives.py")
    ),
    "sampling": Room(("sampling",), ("sampling", "engine/test_engine.py")),
    "acceptance": Room(
        ("spec_decode/acceptance.py", "spec_decode/draft_length.py", "spec_decode/replay.py"),
        ("spec_decode", "engine/test_trees.py"),
    ),
}

# Mutants that change nothing anybody could see: (file below src/octavo, changed line) → why.
EQUIVALENT: dict[tuple[str, str], str] = {}


# The interpreter keeps small integers and the names in the code once: equal ones are identical.
_IDENTITY = ("ReplaceComparisonOperator_Eq_Is", "ReplaceComparisonOperator_NotEq_IsNot")


class Mutant(NamedTuple):
    file: str
    operator: str
    arguments: dict[str, Any]
    occurrence: int
    code: str
    diff: str


class _Run(ast.NodeTransformer):
    """Leaves what runs: no annotations, and nothing for type checkers only."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
        return None if protocol else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def runs(code: str) -> str | None:
    """Return the part of a module that runs: what does not cannot be noticed. None: it is no module
    (a star that is no product, changed like one).
    """
    try:
        return ast.dump(_Run().visit(ast.parse(code)))
    except SyntaxError:
        return None


def mutants(room: Room, sample: int, seed: int) -> Iterator[Mutant]:
    """Yield the sample: the same for the same code, size and seed."""
    package = ROOT / "src/octavo"
    paths = [
        path
        for name in room.files
        for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py"))
    ]
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/db", WorkDB.Mode.create) as db:
        init(sorted(paths), db, {})
        found = [item.mutations[0] for item in db.work_items]
    found.sort(key=lambda each: (str(each.module_path), each.operator_name, each.occurrence))
    random.Random(seed).shuffle(found)
    for each in found:
        if each.operator_name.endswith(_IDENTITY):
            continue
        path = Path(each.module_path)
        source = path.read_text()
        operator = get_operator(each.operator_name)(**each.operator_args)
        code = mutate_code(source, operator, each.occurrence)
        if code is None or runs(code) in (None, runs(source)):
            continue
        lines = [*unified_diff(source.splitlines(), code.splitlines(), lineterm="", n=0)][2:]
        changed = [line[1:].strip() for line in lines if line.startswith("-")]
        file = path.relative_to(package).as_posix()
        if any((file, line) in EQUIVALENT for line in changed):
            continue
        yield Mutant(
            file, each.operator_name, each.operator_args, each.occurrence, code, "\n".join(lines)
        )
        sample -= 1
        if not sample:
            return


class Tree:
    """A copy of the project in which one file is changed at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
        # The package is installed as links to the original: every Python started here forgets that.
        (folder / "sitecustomize.py").write_text(
            "import sys\n"
            "keep = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
            "sys.meta_path[:] = keep\n"
            f"sys.path.insert(0, {str(folder / 'src')!r})\n"
        )

    def run(self, tests: tuple[str, ...], timeout: float) -> tuple[bool, str]:
        """Run tests; return whether all passed in time, and what was printed."""
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("--tb=line", "--hypothesis-profile", "once"),
            *(f"tests/{each}" for each in tests),
        ]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True,
                timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, "timeout"
        return done.returncode == 0, done.stdout + done.stderr

    def survives(self, mutant: Mutant, tests: tuple[str, ...], timeout: float) -> bool:
        path = self.folder / "src/octavo" / mutant.file
        original = path.read_text()
        try:
            path.write_text(mutant.code)
            return self.run(tests, timeout)[0]
        finally:
            path.write_text(original)


def try_room(name: str, trees: list[Tree], sample: int, seed: int) -> dict[str, Any]:
    """Try a room's sample and return the survivors."""
    room = ROOMS[name]
    started = time.monotonic()
    passed, output = trees[0].run(room.tests, 3600)
    if not passed:
        sys.exit(f"{name}: the tests fail without any mutant\n{output[-3000:]}")
    timeout = 60 + 4 * (time.monotonic() - started)
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def attempt(mutant: Mutant) -> bool:
        tree = free.get()
        try:
            return tree.survives(mutant, room.tests, timeout)
        finally:
            free.put(tree)

    chosen = [*mutants(room, sample, seed)]
    survivors = []
    with ThreadPoolExecutor(len(trees)) as pool:
        for number, (mutant, survived) in enumerate(
            zip(chosen, pool.map(attempt, chosen), strict=True), 1
        ):
            if survived:
                survivors.append(mutant)
                print(f"\n{name}: survived, {mutant.file} ({mutant.operator})\n{mutant.diff}")
            print(f"\r{name}: {number} of {len(chosen)}, {len(survivors)} survived", end="")
    seconds = time.monotonic() - started
    print(f"\n{name}: {len(survivors)} of {len(chosen)} survived, in {seconds / 60:.0f} minutes")
    return {
        "mutants": len(chosen),
        "survived": [{"file": each.file, "diff": each.diff} for each in survivors],
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--sample", type=int, default=150, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.rooms) - ROOMS.keys():
        parser.error(f"unknown room {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree(Path(folder) / str(number)) for number in range(args.workers)]
        results = {
            name: try_room(name, trees, args.sample, args.seed) for name in args.rooms or ROOMS
        }
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    bad = [
        name
        for name, found in results.items()
        if len(found["survived"]) > MOST_SURVIVORS * found["mutants"]
    ]
    if bad:
        sys.exit(f"more than a tenth survived in {', '.join(bad)}")


if __name__ == "__main__":
    main()
