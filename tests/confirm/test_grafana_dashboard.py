"""The Grafana file asks only for what is there: our families, their labels, and vLLM's names by their spelling."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from semblend.confirm.metrics import METRICS
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import TOKEN_KINDS

FILE = Path(__file__).parents[2] / "examples" / "grafana_vllm.json"
DASHBOARD = json.loads(FILE.read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
FAMILIES = {spec.name: spec for spec in METRICS}
ALWAYS = {"job", "le"}


def exposed_names() -> set[str]:
    """The names as Prometheus stores them: a histogram is three series."""
    measured = [name for name, spec in FAMILIES.items() if spec.kind == "histogram"]
    histograms = {f"{name}_{part}" for name in measured for part in ("bucket", "sum", "count")}
    return histograms | {name for name, spec in FAMILIES.items() if spec.kind != "histogram"}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_families_that_exist(query):
    ours = set(re.findall(r"\bsemblend_\w+", query))
    assert ours <= exposed_names()
    assert ours or re.findall(r"\bvllm:\w+", query)
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


@pytest.mark.parametrize("query", [query for query in QUERIES if "semblend_" in query])
def test_a_query_asks_for_labels_that_its_family_has(query):
    (name,) = set(re.findall(r"\b(semblend_\w+?)(?:_bucket)?\{", query))
    labels = set(FAMILIES[name].labels) | ALWAYS
    assert set(re.findall(r"(\w+)=~?\"", query)) <= labels
    for listed in re.findall(r"by \(([^)]*)\)", query):
        assert {label.strip() for label in listed.split(",")} <= labels
    assert set(re.findall(r'kind="(\w+)"', query)) <= set(TOKEN_KINDS)
    assert set(re.findall(r'outcome="(\w+)"', query)) <= {str(outcome) for outcome in Outcome}


def test_every_family_of_ours_is_on_the_dashboard_but_likeness_which_is_evidence_only():
    shown = " ".join(QUERIES)
    assert {name for name in FAMILIES if name not in shown} == {"semblend_similarity"}


def test_panels_have_their_own_numbers_and_places():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells = [
        (x, y)
        for panel in PANELS
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)\}?", json.dumps(PANELS))) - {"__rate_interval"}
    assert used <= variables
