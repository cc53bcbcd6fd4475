"""deploy/: its command lines are the product's, and so are the routes that probes ask."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml

import octavo
from listening import listening
from octavo.cli import app
from paths import ROOT

DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text().replace("\\\n", "")
UNIT = (DEPLOY / "octavo.service").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["octavo"]
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
POD = next(each for each in KUBERNETES if each["kind"] == "StatefulSet")["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def instruction(name: str) -> str:
    """Return what the last such line of the Containerfile says."""
    return re.findall(rf"^{name} (.*)$", CONTAINERFILE, re.MULTILINE)[-1]


def setting(name: str) -> str:
    """Return a setting of the systemd unit."""
    [value] = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return value


COMMANDS = {
    "container": json.loads(instruction("CMD")),
    "compose": COMPOSE["command"],
    "systemd": shlex.split(setting("ExecStart"))[1:],
    "kubernetes": CONTAINER["args"],
}
# Seconds that each leaves a server to end after SIGTERM.
GRACE_S = {
    "compose": int(COMPOSE["stop_grace_period"].removesuffix("s")),
    "systemd": int(setting("TimeoutStopSec")),
    "kubernetes": POD["terminationGracePeriodSeconds"]
    - int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1]),
}


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the options of an `octavo` command line; the real CLI refuses a wrong one."""
    root: Any = typer.main.get_command(app)
    params: dict[str, Any] = root.commands[words[0]].make_context(words[0], words[1:]).params
    return params


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_parses(name: str) -> None:
    assert COMMANDS[name][0] == "serve"
    assert parsed(list(COMMANDS[name]))["model"] == "smollm2"


@pytest.mark.parametrize("name", GRACE_S)
def test_running_requests_may_finish_before_the_server_is_killed(name: str) -> None:
    drain_s = float(parsed(list(COMMANDS[name]))["shutdown_timeout"])
    assert drain_s + 15 <= GRACE_S[name]  # a step that ends, and the process


def test_the_image_is_of_this_version() -> None:
    tag = f"octavo:{octavo.__version__}"
    assert COMPOSE["image"] == CONTAINER["image"] == tag
    assert set(re.findall(r"octavo:\d\S*", CONTAINERFILE)) == {tag}


def test_the_image_is_built_of_files_that_are_there() -> None:
    sources = re.findall(r"^COPY (?!--)(.*) \S+$", CONTAINERFILE, re.MULTILINE)
    copied = [name for line in sources for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)


def test_ports_volumes_and_users_agree() -> None:
    port = int(instruction("EXPOSE"))
    assert {parsed(list(words))["port"] for words in COMMANDS.values()} == {port}
    assert COMPOSE["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": port}]
    home = instruction("VOLUME")
    assert f"OCTAVO_HOME={home}" in instruction("ENV")
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert mounts["models"] == home == COMPOSE["volumes"][0].split(":")[1]
    user = POD["securityContext"]["runAsUser"]
    assert instruction("USER") == f"{user}:{POD['securityContext']['runAsGroup']}"
    claims = next(each for each in KUBERNETES if each["kind"] == "StatefulSet")["spec"]
    made = {each["name"] for each in POD["volumes"]}
    made |= {each["metadata"]["name"] for each in claims["volumeClaimTemplates"]}
    assert made == set(mounts)


def test_kubernetes_objects_select_each_other() -> None:
    service, stateful = KUBERNETES
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == stateful["spec"]["selector"]["matchLabels"] == labels
    assert service["metadata"]["name"] == stateful["spec"]["serviceName"]
    resources = CONTAINER["resources"]
    assert resources["requests"] == resources["limits"]  # steps of even length


def test_a_server_started_as_in_kubernetes_answers_its_probes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "chat", "key": "sk-chat"}]}')
    tiny = ROOT / "tests/oracle/tiny-llama-small.gguf"
    words = [
        word.replace("/etc/octavo/keys.json", str(keys)).replace("smollm2", str(tiny))
        for word in CONTAINER["args"]
    ]
    health = re.search(r"urlopen\('http://localhost:\d+(/\w+)'\)", instruction("HEALTHCHECK"))
    assert health
    probes = {CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")}
    probes |= {CONTAINER["startupProbe"]["httpGet"]["path"], health[1]}
    command = (sys.executable, "-m", "octavo", *words, "--port", "0")
    with listening(*command) as (url, _):
        url = url.replace("0.0.0.0", "127.0.0.1")
        for path in probes:
            assert httpx.get(url + path).status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        allowed = {"Authorization": "Bearer sk-chat"}
        assert httpx.get(f"{url}/v1/models", headers=allowed).status_code == 200


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "octavo.service"
    unit.write_text(UNIT.replace("/opt/octavo/bin/octavo", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
