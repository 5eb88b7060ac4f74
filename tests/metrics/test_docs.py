"""The dashboard and the scrape configuration name what the services have, under good names (the documentation: tests/packaging/test_docs.py)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator import exposition
from drafter_svc import metrics as drafter_metrics
from specwire.http import metrics as http_metrics
from tests.metrics.scrape import series_of
from verifier_svc import metrics as verifier_metrics

ROOT = Path(__file__).parents[2]
SERVICES = {"Coordinator": exposition.METRICS, "Verifier": verifier_metrics.METRICS, "Drafter": drafter_metrics.METRICS, "HTTP": http_metrics.METRICS}
ALL = {name: metric for metrics in SERVICES.values() for metric in metrics for name in series_of(metric)}
OBSERVABILITY = ROOT / "deploy" / "observability"
PROMETHEUS_LABELS = {"le", "instance", "job"}
DASHBOARD = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "specwire.json").read_text(encoding="utf-8"))
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("service", SERVICES)
def test_names_say_service_and_unit(service: str) -> None:
    metrics = SERVICES[service]
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.name.startswith(f"specwire_{service.lower()}_")
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert not set(metric.labels) & PROMETHEUS_LABELS, "Prometheus sets these itself"
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_tokens")), f"{metric.name} has no unit"


def test_the_dashboard_has_what_it_is_for() -> None:
    shown = " ".join(target["expr"] for _, target in TARGETS)
    for what in (
        "generated_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds", "accepted_at_position_total", "speculative_tokens",
        "step_part_seconds", "waiting_sequences", "kv_blocks_used", "fallbacks_total",
    ):  # fmt: skip
        assert f"specwire_coordinator_{what}" in shown
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"} == {"prometheus"}


@pytest.mark.parametrize(("title", "target"), TARGETS)
def test_expressions_name_only_metrics_and_labels_that_exist(title: str, target: dict[str, Any]) -> None:
    expression = target["expr"]
    names = set(re.findall(r"specwire_\w+", expression))
    assert names, f"{title}: no metric in {expression}"
    assert names <= ALL.keys(), f"{title}: {names - ALL.keys()} do not exist"
    assert expression.count("(") == expression.count(")"), title
    labels = {label for name in names for label in ALL[name].labels} | PROMETHEUS_LABELS
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert grouped <= labels, f"{title}: {grouped - labels} are no labels of {names}"
    legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert legend <= (grouped or labels), f"{title}: the legend shows {legend}"
    # A counter is shown as a rate, a state as it is.
    for name in names:
        is_rated = f"rate({name}[" in expression
        assert is_rated == (ALL[name].kind != "gauge"), f"{title}: {name} is a {ALL[name].kind}"


def test_prometheus_reads_every_service() -> None:
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text(encoding="utf-8"))
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    assert {name: entry["names"] for name, entry in found.items()} == {f"specwire-{name.lower()}": [name.lower()] for name in SERVICES}
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    for service in ("coordinator", "http", "verifier", "drafter"):
        port = found[f"specwire-{service}"]["port"]
        assert f"--metrics-listen=0.0.0.0:{port}" in compose["services"][service]["command"]


def test_grafana_is_provisioned_with_the_dashboard_and_its_source() -> None:
    provisioning = OBSERVABILITY / "grafana" / "provisioning"
    sources = [source for path in sorted((provisioning / "datasources").glob("*.y*ml")) for source in _read(path)["datasources"]]
    assert {"prometheus"} <= {source["uid"] for source in sources if source["type"] == "prometheus"}
    providers = [provider for path in sorted((provisioning / "dashboards").glob("*.y*ml")) for provider in _read(path)["providers"]]
    mounts = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["grafana"]["volumes"]
    folders = {mount.split(":")[1] for mount in mounts if mount.startswith("./deploy/observability/grafana/dashboards:")}
    assert {provider["options"]["path"] for provider in providers} == folders


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
