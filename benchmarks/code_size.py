"""Code lines, classes and functions of each room of one tree, or of two trees side by side.

    python benchmarks/code_size.py [TREE] [OTHER] [--json]

A tree is a checkout, this one by default; a room is a folder of its src/octavo. Lines are those of
code: not blank, no comment, no docstring.
"""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

from _script import as_script

WHAT = ("files", "lines", "classes", "functions")
_BLANK = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def size(path: Path) -> Counter[str]:
    text, lines = path.read_text("utf-8"), set[int]()
    for kind, _, begin, end, _ in tokenize.generate_tokens(io.StringIO(text).readline):
        lines |= set() if tokenize.tok_name[kind] in _BLANK else {*range(begin[0], end[0] + 1)}
    found = Counter(files=1)
    for node in ast.walk(ast.parse(text)):
        found["classes"] += isinstance(node, ast.ClassDef)
        found["functions"] += isinstance(node, _FUNCTIONS)
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found + Counter(lines=len(lines))


def rooms(tree: Path) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for path in sorted((tree / "src" / "octavo").rglob("*.py")):
        room = path.relative_to(tree / "src" / "octavo").parts[0]
        found.setdefault("." if room.endswith(".py") else room, Counter()).update(size(path))
    return found | {"all": sum(found.values(), Counter())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    trees = {str(tree): rooms(tree) for tree in given.trees}
    table = "".join(f"{name:>11}" for _ in trees for name in WHAT)
    for room in dict.fromkeys(room for found in trees.values() for room in found):
        rows = [found.get(room, Counter()) for found in trees.values()]
        table += f"\n{room:<14}" + "".join(f"{row[name]:>11,}" for row in rows for name in WHAT)
    print(json.dumps(trees) if given.json else f"{'room':<14}{table}")


if __name__ == "__main__":
    as_script(main)
