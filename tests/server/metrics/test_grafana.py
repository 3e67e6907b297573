"""The Grafana dashboard of compose.yaml asks for metrics and labels that /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.live import live

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "thermocline.json").read_text())
# Of samples that do not exist before the first refused or dropped request.
LATER_LABELS = {"thermocline:request_failure_total": {"reason"}}
_NAME = re.compile(r"thermocline:\w+")


def queries() -> list[tuple[str, str]]:
    """Each expression of the dashboard, with the label of its lines."""
    return [
        (target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


@pytest.fixture
async def labels(toy) -> dict[str, set[str]]:
    """The labels of each sample of /metrics after an answer, by its name."""
    async with live(toy) as server:
        await server.chat(max_tokens=3)
        async with server.client.get("/metrics") as response:
            text = await response.text()
    found: dict[str, set[str]] = {name: set(held) for name, held in LATER_LABELS.items()}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_metric_and_label_of_the_dashboard_is_there(labels):
    """As the running server shows them, with the labels by which lines are told apart."""
    assert len(queries()) > 20
    for expression, legend in queries():
        names = _NAME.findall(expression)
        assert names, expression
        assert set(names) <= labels.keys(), expression
        wanted = set(re.findall(r"\{\{(\w+)\}\}", legend))
        grouped = {
            label.strip()
            for group in re.findall(r"by \(([^)]+)\)", expression)
            for label in group.split(",")
        }
        for name in names:
            assert wanted | grouped <= labels[name], expression


async def test_counters_are_asked_for_rates_and_gauges_for_values(labels):
    """A counter's own value says when the server started, not how it does."""
    for expression, _ in queries():
        for name in _NAME.findall(expression):
            is_counted = name.endswith(("_total", "_bucket"))
            assert is_counted == (f"rate({name}[$__rate_interval])" in expression), expression


def test_no_two_panels_lie_on_each_other():
    """Grafana draws them where the file says."""
    places = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in DASHBOARD["panels"]
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_files_of_the_composition_fit_together():
    """Each file that is mounted exists; Prometheus asks the service at its port with the key that it was given."""
    composition = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())
    services = composition["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            is_file = source.startswith("./")
            assert (
                (DEPLOY.parent / source).is_file() if is_file else source in composition["volumes"]
            )
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert set(service.get("secrets", ())) <= composition["secrets"].keys()
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    (secret,) = services["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    name, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert services[name]["ports"][0].endswith(f":{port}")
    command = services[name]["command"]
    assert command[command.index("--allowed-hosts") + 1] == name
    assert command[command.index("--api-key-file") + 1] == f"/run/secrets/{secret}"
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"][0]
    used = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]}
    assert used == {source["uid"]}
