"""Records what transformers' AutoTokenizer makes of folders with unusual added tokens.

Run by hand, in an environment with transformers:

    python tests/oracle/record_odd_folders.py [--count 60] [--first 1] [--out FILE]

FILE (odd_folders.json here) holds, for each seed of odd_folders.py, the ids of its texts and what
they decode to with and without special tokens, or why AutoTokenizer refuses the folder.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from odd_folders import build  # noqa: E402


def record(seed: int) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        texts = build(Path(folder), seed)
        try:
            auto = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            return {"seed": seed, "refused": f"{type(error).__name__}: {error}"[:200]}
        found: dict[str, Any] = {"seed": seed, "class": type(auto).__name__, "size": len(auto)}
        found["names"] = auto.special_tokens_map
        cases = []
        for text in texts:
            ids = auto(text)["input_ids"]
            decoded = auto.decode(ids)
            skipped = auto.decode(ids, skip_special_tokens=True)
            cases.append([ids, decoded, None if skipped == decoded else skipped])
        found["cases"] = cases
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=1, help="seed")
    parser.add_argument("--out", type=Path, default=HERE / "odd_folders.json")
    args = parser.parse_args()
    found = [record(seed) for seed in range(args.first, args.first + args.count)]
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in found)
    args.out.write_text(f"[\n{lines}\n]\n")
    refused = sum("refused" in each for each in found)
    print(f"{len(found)} folders, {refused} of them refused, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
