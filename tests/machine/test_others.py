"""What others take of the processor, from /proc/stat (proc_stat(5))."""

import os
from pathlib import Path

import pytest

from octavo.machine import others as module
from octavo.machine.others import Others

TICK = os.sysconf("SC_CLK_TCK")


def stat(root: Path, user: float, steal: float = 0.0) -> None:
    """Each of the allowed CPUs with so many seconds; another one that is always at work."""
    (root / "proc").mkdir(exist_ok=True)
    allowed = sorted(os.sched_getaffinity(0))
    lines = ["cpu  1 2 3 4 5 6 7 8 0 0"]
    lines += [f"cpu{cpu} {round(user * TICK)} 0 0 9 9 0 0 {round(steal * TICK)}" for cpu in allowed]
    lines += [f"cpu{max(allowed) + 1} {round(99 * user * TICK)} 0 0 0 0 0 0 0 0 0", "intr 1 2"]
    (root / "proc/stat").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("user", "steal", "own", "said"),
    [
        (1.0, 0.0, 1.0, ""),  # all of it is this process
        (1.02, 0.0, 1.0, ""),
        (6.0, 0.0, 0.0, "other processes took"),
        (0.0, 3.0, 0.0, "the machine's host 0.3"),
    ],
)
def test_what_others_take_is_what_this_process_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: float,
    steal: float,
    own: float,
    said: str,
) -> None:
    cpus = len(os.sched_getaffinity(0))
    clock, mine = [100.0], [5.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.time, "process_time", lambda: mine[0])
    stat(tmp_path, 50.0)
    others = Others(tmp_path)
    clock[0] += 10.0
    mine[0] += own * cpus
    stat(tmp_path, 50.0 + user, steal / cpus)
    taken = others.taken()
    assert taken.others == pytest.approx(max(0.0, user - own) * cpus / 10, abs=0.02 * cpus)
    assert taken.stolen == pytest.approx(steal / 10, abs=0.02)
    assert said in taken.text
    assert bool(taken.text) is bool(said)


@pytest.mark.parametrize("text", [None, "", "cpu0 1 2", "cpu0 a b c d e f g h"])
def test_a_system_that_does_not_say_is_not_guessed(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/stat").write_text(text)
    assert Others(tmp_path).taken().text == ""
