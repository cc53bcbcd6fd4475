"""Octavo's own server, as the tests of the serve room build it, is loaded here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "server"))
