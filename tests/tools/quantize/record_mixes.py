"""Records which formats llama.cpp's mixes give to the tensors of small models: mixes.json, by
model and tensor, in the order of `Mix`.

    PYTHONPATH=src:tests python tests/tools/quantize/record_mixes.py LLAMA_QUANTIZE

LLAMA_QUANTIZE is llama.cpp's program, of a version with --dry-run. The models are those of
mix_models.py, which the tests make again.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from octavo.tools.quantize.mixes import Mix
from tools.quantize.mix_models import MODELS, mix_file

LINE = re.compile(r"\] +(\S+) +- \[.*type = +(\w+),.*?(?:\((\w+)\))?$")


def formats(program: str, model: Path, mix: str) -> dict[str, str]:
    """By tensor, of its matrices."""
    command = [program, "--dry-run", "--allow-requantize", str(model), mix]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {}
    for line in (done.stdout + done.stderr).splitlines():
        if match := LINE.search(line):
            name, before, after = match.groups()
            found[name] = (after or before).upper()
    return {name: format for name, format in sorted(found.items()) if format != "F32"}


def main() -> None:
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            model = mix_file(name, Path(folder))
            by_mix = [formats(sys.argv[1], model, mix.name) for mix in Mix]
            recorded[name] = {
                tensor: " ".join(found[tensor] for found in by_mix) for tensor in by_mix[0]
            }
    path = Path(__file__).with_name("mixes.json")
    path.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
