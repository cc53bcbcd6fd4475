"""The models in the cache: what they are called, listed, and removed."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import strict_json
from octavo.cli import app
from octavo.loader import load, pull
from octavo.loader.pull import KNOWN, PullError, known, resolve, servable
from octavo.loader.pulled import find, pulled, remove
from octavo.tools.plan.presets import PRESETS
from octavo.tools.plan.subject import Subject
from paths import TINY


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two models, one of them not whole, and what a pull leaves while it runs."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    models = tmp_path / "models"
    data = TINY.read_bytes()
    monkeypatch.setitem(
        pull._BY_NAME,
        "smollm2",
        own := pull.KnownModel("smollm2", "", "tiny.gguf", len(data), "", (), ("smollm2-135m",)),
    )
    monkeypatch.setitem(KNOWN, "smollm2", own)
    monkeypatch.setitem(pull._BY_NAME, "smollm2135m", own)
    for name, file, content in (
        ("smollm2", "tiny.gguf", data),
        ("smollm2", "LICENSE", b"ten bytes."),
        ("gemma3-270m", "gemma-3-270m-q4_k_m.gguf", b"half"),
        (".gemma3-270m.part", "wheel", b"x"),
    ):
        (models / name).mkdir(parents=True, exist_ok=True)
        (models / name / file).write_bytes(content)
    (models / ".smollm2.lock").touch()
    return tmp_path


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input)


# --- one list of names ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2", "smollm2-135m", "SmolLM2_135M"])
def test_a_name_means_the_same_to_all_commands(home: Path, name: str) -> None:
    path = home / "models/smollm2/tiny.gguf"
    assert resolve(name) == path
    found = Subject.find(name)
    assert found.stored is not None
    assert found.name == "smollm2"
    assert load(path).config.name == "smollm2"
    assert servable(name) == name


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135m"])
def test_what_is_not_pulled_is_planned_by_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.setattr(pull, "pull", None)  # nothing is fetched
    found = Subject.find(name)
    assert (found.name, found.stored) == ("smollm2-135m", None)
    assert found.parameters == 134_515_008


def test_every_preset_is_served_or_says_where_its_weights_are() -> None:
    for name in PRESETS:
        if known(name):
            continue
        repo = pull.HUB_IDS[name]
        with pytest.raises(PullError, match=f"{repo} is not in the Hugging Face cache and down"):
            resolve(name, download=False)
        assert "/" in servable(name)
        assert servable(name) in pull.HUB_IDS.values()
    assert servable("org/repo") == "org/repo"
    assert servable("somewhere/config.json") == "somewhere"


def test_a_folder_of_a_presets_name_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m/own.gguf").write_bytes(TINY.read_bytes())
    assert resolve("smollm2-135m") == tmp_path / "smollm2-135m/own.gguf"
    assert servable("smollm2-135m") == "smollm2-135m"


def test_the_list_of_names_has_all() -> None:
    listed = " ".join(run("pull", "--list").output.split())
    for name in (*KNOWN, *PRESETS):
        assert name in listed


# --- list and rm ---------------------------------------------------------------------------------


def test_list(home: Path) -> None:
    size = TINY.stat().st_size + 10
    assert [(each.name, each.size) for each in pulled()] == [("gemma3-270m", 4), ("smollm2", size)]
    lines = run("list").output.splitlines()
    assert lines[0].split()[:3] == ["gemma3-270m", "0.0", "MB"]
    assert lines[0].endswith("not whole; octavo pull gemma3-270m mends it")
    assert lines[1].endswith("/models/smollm2/tiny.gguf")
    facts = strict_json.loads(run("list", "--json").output)
    assert facts["models"][1]["bytes"] == size
    assert facts["models"][0]["path"] is None


def test_an_empty_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "none"))
    assert run("list").output.startswith(f"no models in {tmp_path}/none/models")


def test_rm_takes_a_model_away(home: Path) -> None:
    result = run("rm", "SmolLM2-135M", "--yes")
    assert result.exit_code == 0
    assert "freed" in result.output
    assert [each.name for each in pulled()] == ["gemma3-270m"]
    assert (home / "models/.smollm2.lock").exists()


def test_rm_asks_and_does_nothing_by_itself(home: Path) -> None:
    result = run("rm", "smollm2")
    assert result.exit_code == 2
    assert "say --yes" in result.stderr
    assert len(pulled()) == 2


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/", "../models/smollm2", "smollm2/../..", ".gemma3-270m.part", "nix"]
)
def test_rm_does_not_leave_the_cache(home: Path, name: str) -> None:
    before = sorted(home.rglob("*"))
    with pytest.raises(PullError, match="is not a pulled model"):
        remove(name)
    assert isinstance(run("rm", "smollm2", name, "--yes").exception, PullError)  # not even one
    assert sorted(home.rglob("*")) == before


def test_of_a_link_only_the_link_goes(home: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "precious").touch()
    (home / "models/mine").symlink_to(own)
    assert find("mine").size == 0
    remove("mine")
    assert (own / "precious").exists()
    assert not (home / "models/mine").exists()
