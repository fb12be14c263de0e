"""The dashboard asks only for metrics and labels that a server exports, and for all of those."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_harness import fake_server

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
WORDS = {
    "avg",
    "sum",
    "by",
    "le",
    "rate",
    "max",
    "histogram_quantile",
    "model_name",
    "finished_reason",
}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Sample name -> its labels, of a server that has answered something."""
    with fake_server({"p": "abc"}) as server:
        server.complete("p")
        server.wait_idle()
        text = server.get("/metrics").text
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_is_exported(exported: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = re.findall(r"shark_\w+", expression)
        assert names
        for name in names:
            assert name in exported, expression
            assert "model_name" in exported[name]
            assert f'{name}{{model_name=~"$model_name"}}' in expression
        # All other words are functions, labels and variables that we know.
        bare = re.sub(r'shark_\w+|"[^"]*"|\$\w+|[0-9.]+', "", expression)
        assert set(re.findall(r"[a-z_]+", bare)) <= WORDS, expression
        if "finished_reason" in expression:
            assert "finished_reason" in exported[names[0]]


def test_every_metric_has_a_panel(exported: dict[str, set[str]]) -> None:
    shown = set(re.findall(r"shark_\w+", " ".join(expressions())))
    families = {
        re.sub(r"_(bucket|sum|count|created)$", "", name)
        for name in exported
        if not name.endswith("_created")
    }
    missing = {family for family in families if not any(name.startswith(family) for name in shown)}
    assert missing == set()


def test_the_form_is_what_grafana_reads() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "model_name"}
