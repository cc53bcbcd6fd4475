"""The table of families in docs/models.md is the one that their records make."""

from __future__ import annotations

from pathlib import Path

from octavo.models.families import ARCHITECTURES, FAMILIES
from octavo.models.family import Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = "| family | `model_type` | GGUF | |\n|---|---|---|---|\n"


def row(family: Family) -> str:
    types = ", ".join(f"`{kind.model_type}`" for kind in (*family.hf, *family.wrappers))
    shared = ""
    if family.architecture and family.expert_size:
        shared = " with `expert_count`"
    elif len(ARCHITECTURES.get(family.gguf, [])) > 1 and family.windows:
        shared = " with `attention.sliding_window`"
    gguf = f"`{family.gguf}`{shared}" if family.gguf else ""
    cells = (family.title, types, gguf, family.note)
    return "| " + " | ".join(cells).rstrip() + " |\n"


def test_the_table_of_families() -> None:
    table = HEAD + "".join(row(family) for family in FAMILIES.values())
    found = PAGE.read_text().partition("## Families\n\n")[2].partition("\n\n")[0] + "\n"
    assert found == table, f"{PAGE} should have\n\n{table}"
