# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Alerts by truth tables, the dashboard by the names that there are, and what the role refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.exposition import FAMILIES, PREFIX
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.observe import STATES
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.plan import STOPPED_FOR_SLEEP
from ansible_collections.baremetal.vllm.tests.unit.roles.role import Role

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RULES = ROOT / "roles/vllm_observability/files/vllm.rules.yml"
DASHBOARD = ROOT / "roles/vllm_observability/files/vllm.dashboard.json"
EXAMPLE = ROOT / "docs/examples/prometheus.yml"
HOST = 'instance="gpu1:9100",job="node"'
CHAT = f'{HOST},engine="chat"'
GIB = 1024**3


def promtool(*words) -> subprocess.CompletedProcess[str]:
    path = shutil.which("promtool")
    assert path, "promtool is missing: run make deps (Debian's package prometheus)"
    return subprocess.run([path, *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def alerts() -> dict[str, dict]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_prometheus_takes_the_rules():
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def state(*names, engine="chat"):
    """The one-hot state of an engine over time, a minute for each sample; a name may be a pair with its minutes."""
    lane = [name for name, minutes in names for _minute in range(minutes)]
    return {
        f'vllm_lifecycle_state{{{HOST},engine="{engine}",state="{one}"}}': " ".join(
            str(int(name == one)) for name in lane
        )
        for one in STATES
    }


def info(run="r1", purpose="drained"):
    return {f'vllm_lifecycle_lease_info{{{CHAT},owner="o",purpose="{purpose}",run="{run}"}}': "1x300"}


def const(family, value, labels=CHAT):
    return {f"vllm_lifecycle_{family}{{{labels}}}": f"{value}x300"}


MEMORY = f'{CHAT},gpu="GPU-1"'
# alert, series, minute of the look, whether it fires. Prometheus' clock begins at 0.
TABLE = [
    ("VllmEngineFailed", state(("serving", 5), ("failed", 3)), 7, True),
    ("VllmEngineFailed", state(("serving", 5), ("failed", 3)), 5, False),
    ("VllmEngineFailed", state(("failed", 5), ("starting", 5)), 8, False),
    ("VllmEngineUnknown", state(("serving", 1), ("unknown", 6)), 5, True),
    ("VllmEngineUnknown", state(("serving", 1), ("unknown", 6)), 3, False),
    ("VllmEngineUnknown", state(("unknown", 2), ("serving", 1), ("unknown", 2)), 4, False),
    ("VllmEngineWithdrawnTooLong", state(("withdrawn", 70)), 65, True),
    ("VllmEngineWithdrawnTooLong", state(("withdrawn", 70)), 55, False),
    ("VllmEngineWithdrawnTooLong", state(("draining", 30), ("drained", 20), ("starting", 20)), 65, True),
    ("VllmEngineWithdrawnTooLong", state(("draining", 30), ("serving", 1), ("drained", 39)), 65, False),
    ("VllmEngineWithdrawnTooLong", state(("asleep", 70)), 65, False),
    ("VllmEngineWithdrawnTooLong", state(("stopped", 70)), 65, False),
    ("VllmLeaseExpired", const("lease_expiry_timestamp_seconds", 600), 20, True),
    ("VllmLeaseExpired", const("lease_expiry_timestamp_seconds", 600), 12, False),
    ("VllmLeaseExpired", const("lease_expiry_timestamp_seconds", 60000), 20, False),
    ("VllmRunAbandoned", {**const("lease_progress_timestamp_seconds", 60), **info()}, 70, True),
    ("VllmRunAbandoned", {**const("lease_progress_timestamp_seconds", 60), **info()}, 60, False),
    ("VllmRunAbandoned", {**const("lease_progress_timestamp_seconds", 2400), **info()}, 70, False),
    ("VllmRunAbandoned", {**const("lease_progress_timestamp_seconds", 60), **info(run="")}, 70, False),
    ("VllmRunAbandoned", {**const("lease_progress_timestamp_seconds", 60), **info(purpose="asleep")}, 70, False),
    (
        "VllmRunAbandoned",
        {**const("lease_progress_timestamp_seconds", 60), **info(purpose=STOPPED_FOR_SLEEP)},
        70,
        False,
    ),
    ("VllmGoldenFailed", const("golden_match", 0), 0, True),
    ("VllmGoldenFailed", const("golden_match", 1), 0, False),
    ("VllmGoldenFailed", {}, 0, False),
    (
        "VllmMemoryHeldAfterSleep",
        {**const("gpu_memory_bytes", 9 * GIB, MEMORY), **const("sleep_level", 1)},
        6,
        True,
    ),
    (
        "VllmMemoryHeldAfterSleep",
        {**const("gpu_memory_bytes", 9 * GIB, MEMORY), **const("sleep_level", 1)},
        4,
        False,
    ),
    (
        "VllmMemoryHeldAfterSleep",
        {**const("gpu_memory_bytes", 2 * GIB, MEMORY), **const("sleep_level", 2)},
        6,
        False,
    ),
    (
        "VllmMemoryHeldAfterSleep",
        {**const("gpu_memory_bytes", 9 * GIB, MEMORY), **const("sleep_level", 0)},
        6,
        False,
    ),
    ("VllmMemoryHeldAfterSleep", const("gpu_memory_bytes", 9 * GIB, MEMORY), 6, False),
    ("VllmMetricsStale", const("collection_timestamp_seconds", 60, HOST), 7, True),
    ("VllmMetricsStale", const("collection_timestamp_seconds", 60, HOST), 5, False),
    ("VllmMetricsStale", {f"vllm_lifecycle_collection_timestamp_seconds{{{HOST}}}": "0+60x30"}, 20, False),
    ("VllmMetricsIncomplete", const("collection_success", 0), 6, True),
    ("VllmMetricsIncomplete", const("collection_success", 0), 4, False),
    ("VllmMetricsIncomplete", const("collection_success", 1), 6, False),
]


def rendered(rule, labels, value=""):
    return {
        name: re.sub(
            r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}", lambda match: labels.get(match[1], value), " ".join(text.split())
        )
        for name, text in rule["annotations"].items()
    }


def expected(alert, rule, series):
    """The one alert that fires: with the labels of the series that its expression names first, and its words."""
    family = re.search(r"vllm_lifecycle_\w+", rule["expr"])[0]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', next(one for one in series if one.startswith(family + "{"))))
    if family.endswith("_state"):
        wanted = re.search(r'state="(\w+)"', rule["expr"])
        labels = {name: text for name, text in labels.items() if name != "state"}
        labels |= {"state": wanted[1]} if wanted else {}
    return {
        "exp_labels": {**labels, **rule["labels"]},
        "exp_annotations": rendered(rule, labels, "9Gi" if "Memory" in alert else ""),
    }


def table(alerts, rows) -> dict:
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": one, "values": values} for one, values in series.items()],
                "alert_rule_test": [
                    {
                        "eval_time": f"{minute}m",
                        "alertname": alert,
                        "exp_alerts": [expected(alert, alerts[alert], series)] if fires else [],
                    }
                ],
            }
            for alert, series, minute, fires in rows
        ],
    }


def test_each_alert_fires_when_it_should_and_only_then(alerts, tmp_path):
    assert {(alert, fires) for alert, _series, _minute, fires in TABLE} == {
        (alert, fires) for alert in alerts for fires in (True, False)
    }
    file = tmp_path / "table.yml"
    file.write_text(json.dumps(table(alerts, TABLE)))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    # The table can fail.
    turned = [(alert, series, minute, not fires) for alert, series, minute, fires in TABLE if not fires and series]
    file.write_text(json.dumps(table(alerts, turned)))
    done = promtool("test", "rules", str(file))
    assert (done.stdout + done.stderr).count("exp:") == len(turned)


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bvllm(?::|_lifecycle_)\w+", expression))


def known() -> set[str]:
    """Our own, and those of the versions of vLLM that we know."""
    theirs = yaml.safe_load((HERE / "vllm_metrics.yml").read_text())
    return {
        *(f"{PREFIX}{family}" for family in FAMILIES),
        *(f"{name}_total" for name in theirs["counter"]),
        *theirs["gauge"],
        *(f"{name}_{part}" for name in theirs["histogram"] for part in ("bucket", "sum", "count")),
    }


def test_rules_ask_for_metrics_that_there_are(alerts):
    for rule in alerts.values():
        named = names_in(rule["expr"])
        assert named
        assert named <= known()


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def queries(dashboard) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_there_are(dashboard):
    named = set()
    for query in queries(dashboard):
        assert names_in(query), query
        assert names_in(query) <= known(), query
        named |= names_in(query)
    assert {"vllm:time_to_first_token_seconds_bucket", "vllm:kv_cache_usage_perc"} <= named
    variables = json.dumps(dashboard["templating"])
    assert names_in(variables) <= known()


def test_the_dashboard_shows_each_state_in_its_own_colour(dashboard):
    timeline = dashboard["panels"][0]
    shown = dict(re.findall(r'state="(\w+)"} == 1\) \* (\d+)', timeline["targets"][0]["expr"]))
    (mapping,) = timeline["fieldConfig"]["defaults"]["mappings"]
    assert set(shown) == set(STATES)
    assert {one["text"]: value for value, one in mapping["options"].items()} == shown
    assert len({one["color"] for one in mapping["options"].values()}) == len(STATES)


def test_the_lane_of_an_engine_has_the_number_of_its_state(dashboard, tmp_path):
    query = queries(dashboard)[0].replace("$instance", ".*")
    series = {}
    for name in STATES:
        series.update(state((name, 2), engine=name))
    samples = [
        {"labels": f'{{{HOST},engine="{name}"}}', "value": int(re.search(rf'"{name}"}} == 1\) \* (\d+)', query)[1])}
        for name in STATES
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "1m", "exp_samples": samples}],
    }
    file = tmp_path / "lanes.yml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_every_query_of_the_dashboard(dashboard, tmp_path):
    rules = [
        {
            "record": f"query:{number}",
            "expr": query.replace("$__rate_interval", "5m").replace("$instance", ".*"),
        }
        for number, query in enumerate(queries(dashboard))
    ]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", "--lint=none", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_panels_do_not_lie_on_each_other(dashboard):
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _y in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_takes_the_example():
    done = promtool("check", "config", "--syntax-only", str(EXAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_names_every_metric_and_every_alert(alerts):
    page = (ROOT / "docs/observability.md").read_text()
    assert set(re.findall(r"`vllm_lifecycle_(\w+)", page)) == set(FAMILIES)
    assert set(re.findall(r"`(Vllm\w+)`", page)) == set(alerts)


GOOD = {"vllm_observability_textfile_dir": "/var/lib/node_exporter/textfile-1.0", "vllm_observability_interval": 15}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, None),
        ({**GOOD, "vllm_observability_timeout": 14}, None),
        ({"vllm_observability_textfile_dir": "relative"}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": "/"}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": ""}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": "/srv/a b"}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": "/srv/%n"}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": "/srv/a\nExecStart=/bin/sh"}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": "/srv/a\n"}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": "/srv/../etc"}, "no plain absolute path"),
        ({"vllm_observability_textfile_dir": "/srv/.."}, "no plain absolute path"),
        ({"vllm_observability_timeout": 60}, "ends before the next one begins"),
        ({"vllm_observability_interval": 45}, "ends before the next one begins"),
        ({"vllm_observability_timeout": 4}, "use a timeout of 5 s or more"),
        ({"vllm_observability_timeout": "soon"}, "use a timeout of 5 s or more"),
    ],
)
def test_what_the_role_refuses_by_its_variables(variables, says):
    role = Role("vllm_observability", variables, "gpu1")
    names = ("Have a directory that a unit can name", "Look in time")
    role.tasks = [task for task in role.tasks if task["name"] in names]
    assert len(role.tasks) == len(names)
    found = role.refusal()
    assert (found is None) if says is None else (says in found)
