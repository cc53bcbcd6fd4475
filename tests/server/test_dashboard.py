"""docs/grafana.json and docs/metrics.md against the metrics of a running server."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from observed import HEADERS, KEY, make_traffic, observed_server
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from paths import ROOT

DOCS = ROOT / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {
    variable["name"]: variable for variable in DASHBOARD["templating"]["list"]
}
EXPRESSIONS: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:octavo:\w+|process_\w+)", expression))


def filled(expression: str) -> str:
    """With the dashboard's variables as Grafana would fill them in."""
    return (
        expression.replace("$model_name", "tiny")
        .replace("$instance", ".*")
        .replace("$__rate_interval", "1m")
    )


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 38  # Grafana 10
    assert DASHBOARD["id"] is None
    assert list(VARIABLES) == ["datasource", "model_name", "instance"]
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [(panel["type"], panel["title"]) for panel in PANELS]
    assert len(set(titles)) == len(titles)
    declared = {each["id"] for each in DASHBOARD["__requires"] if each["type"] == "panel"}
    assert {panel["type"] for panel in PANELS} == declared
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_query_is_of_the_chosen_server() -> None:
    uses = [panel["datasource"] for panel in PANELS]
    uses += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    assert all(use == {"type": "prometheus", "uid": "${datasource}"} for use in uses)
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
    for expression in EXPRESSIONS:
        assert names(expression), expression
        for name, selector in re.findall(r"(octavo:\w+|process_\w+)(\{[^}]*\})?", expression):
            assert 'instance=~"$instance"' in selector, expression
            if name.startswith("octavo:") and "http_requests" not in name:
                assert 'model_name="$model_name"' in selector, expression


class Exposed(NamedTuple):
    plain: httpx.Response
    open_metrics: httpx.Response


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    """/metrics of a server on which everything has happened."""

    async def scrape() -> Exposed:
        async with observed_server(tmp_path_factory.mktemp("connectors")) as (client, metrics):
            await make_traffic(client, metrics)
            return Exposed(
                await client.get("/metrics"), await client.get("/metrics", headers=OPENMETRICS)
            )

    return asyncio.run(scrape())


def test_every_metric_of_the_dashboard_is_there(exposed: Exposed) -> None:
    plain, open_metrics = exposed
    assert plain.headers["content-type"].startswith("text/plain")
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    samples = [
        sample.name
        for family in text_string_to_metric_families(plain.text)
        for sample in family.samples
    ]
    also = [
        sample.name
        for family in openmetrics.text_string_to_metric_families(open_metrics.text)
        for sample in family.samples
    ]
    assert {*samples} == {*also}
    series = [line.rpartition(" ")[0] for line in plain.text.splitlines() if line[0] != "#"]
    assert len(set(series)) == len(series)
    queries = [str(variable.get("definition", "")) for variable in VARIABLES.values()]
    used = set().union(*map(names, [*EXPRESSIONS, *queries, (DOCS / "alerts.yml").read_text()]))
    assert len(used) > 40
    assert used <= set(samples)


def test_the_page_lists_every_metric(exposed: Exposed) -> None:
    """Type, labels and meaning of each are what the server says."""
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(exposed.plain.text)
        if not family.name.endswith("_created")
    }
    page = (DOCS / "metrics.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.match(r"\| `(octavo:|process_)", line)
    ]
    listed = [row[0].strip("`") for row in rows]
    assert listed == sorted(set(listed))
    assert set(listed) == families.keys()
    for name, kind, labels, unit, meaning in rows:
        family = families[name.strip("`")]
        assert kind == family.type, name
        own = {label for sample in family.samples for label in sample.labels}
        assert {*re.findall(r"`(\w+)`", labels)} == own - {"model_name", "engine", "le"}, name
        assert ("seconds" in unit) == ("_seconds" in name), name
        if name.startswith("`octavo:"):
            assert meaning == family.documentation, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_promtool_finds_nothing_wrong(exposed: Exposed) -> None:
    command = ["promtool", "check", "metrics"]
    text = exposed.plain.text
    checked = subprocess.run(command, input=text, capture_output=True, text=True)
    # vLLM's names have a colon, and one of its histograms a counter's ending.
    found = [
        line
        for line in (checked.stdout + checked.stderr).splitlines()
        if "should not contain ':'" not in line
        and not line.startswith("octavo:iteration_tokens_total non-counter metrics should not have")
    ]
    assert found == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_alerts_fire_when_they_must_and_only_then() -> None:
    rules = Path(__file__).parent / "alerts_test.yml"
    command = ["promtool", "test", "rules", str(rules)]
    tested = subprocess.run(command, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """A Prometheus server that scrapes ``target`` each second; gives its URL."""
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                "scrape_configs": [
                    {
                        "job_name": "octavo",
                        "authorization": {"credentials": KEY},
                        "static_configs": [{"targets": [target]}],
                    }
                ],
            }
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--web.listen-address={url}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"http://{url}"
        finally:
            child.terminate()
            child.wait(20)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus")
async def test_a_real_prometheus_answers_every_query(tmp_path: Path) -> None:
    async with observed_server(tmp_path) as (client, metrics):
        with prometheus(client.base_url.netloc.decode(), tmp_path) as url:
            async with httpx.AsyncClient(base_url=url, timeout=20) as asking:

                async def query(expression: str) -> list[Any]:
                    answer = await asking.get("/api/v1/query", params={"query": expression})
                    assert answer.status_code == 200, answer.text
                    result: list[Any] = answer.json()["data"]["result"]
                    return result

                async with asyncio.timeout(240):
                    while True:
                        with suppress(httpx.TransportError):
                            if (await asking.get("/-/ready")).status_code == 200:
                                break
                        await asyncio.sleep(0.1)
                    while not await query("octavo:num_requests_running"):
                        await asyncio.sleep(0.1)
                    await make_traffic(client, metrics)
                    # A rate is of what has grown between two scrapes.
                    await make_traffic(client, metrics)
                    seen = (await client.get("/metrics", headers=HEADERS)).text
                    last = re.search(r"^octavo:engine_steps_total\S* (\S+)$", seen, re.MULTILINE)
                    while float((await query("octavo:engine_steps_total"))[0]["value"][1]) < float(
                        last[1]
                    ):
                        await asyncio.sleep(0.1)
                for expression in EXPRESSIONS:
                    result = await query(filled(expression))
                    assert result, expression
                    values = [float(each["value"][1]) for each in result]
                    assert any(value == value for value in values), (expression, values)
                for name in ("model_name", "instance"):
                    found = re.fullmatch(
                        r"label_values\((.*), (\w+)\)", VARIABLES[name]["definition"]
                    )
                    matching = {"match[]": filled(found[1])}
                    answer = await asking.get(f"/api/v1/label/{found[2]}/values", params=matching)
                    assert answer.json()["data"]
