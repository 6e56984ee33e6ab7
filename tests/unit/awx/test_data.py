# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""awx/ is what AWX takes, asks what the playbooks take, and rolls nothing side by side."""

from __future__ import annotations

import re
from datetime import datetime

import jinja2
import pytest
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader

from ansible_collections.baremetal.vllm.tests.unit.awx import controller, specs

# Never asked: what belongs into the inventory, or to one run; a report would go with the job's container.
OF_INVENTORY = re.compile(
    r"vllm_(host_control_python|router_hosts|switch_group|schedule|schedule_now|report_path)$"
    r"|.*_(run|group|connect_timeout|host_copy_mib|max_resident_mib)$"
)
NO_TEMPLATE = {"golden"}  # its files would go with the job's container
FROM_ZERO = re.compile(r".*_(min_serving|max_failed|canary|soak|share|ratio)$")


@pytest.fixture(scope="module")
def data() -> dict:
    return controller.variables(vllm_awx_engines=["chat", "code"])


@pytest.fixture(scope="module")
def templates(data) -> dict[str, dict]:
    return {one["name"]: one for one in data["controller_templates"]}


def questions(template: dict) -> dict[str, dict]:
    return {one["variable"]: one for one in template["survey_spec"]["spec"]}


@pytest.mark.parametrize("name", controller.OBJECTS)
def test_fields_are_those_of_the_module_and_of_the_role(monkeypatch, name):
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    known = controller.SCHEMA[name]
    found = controller.variables()[name]
    assert found
    for one in found:
        assert list(controller.misfits(one, known["options"], one["name"])) == []
        assert set(one) <= set(known["role_reads"])
        assert one["description"]


def test_every_list_has_a_schema(data):
    assert {name for name in data if name.startswith("controller_")} == set(controller.OBJECTS)


def test_own_variables_have_their_prefix(data):
    assert [name for name in data if not re.match("controller_|(__)?vllm_awx_", name)] == []


def test_names_are_unique_and_lead_somewhere(data):
    def names(kind: str) -> list[str]:
        return [one["name"] for one in data[kind]]

    for kind in controller.OBJECTS:
        assert len(names(kind)) == len(set(names(kind)))
    for template in data["controller_templates"]:
        assert template["project"] in names("controller_projects")
        assert template["inventory"] in names("controller_inventories")
        assert template["execution_environment"] in names("controller_execution_environments")
    for source in data["controller_inventory_sources"]:
        assert source["source_project"] in names("controller_projects")
        assert source["inventory"] in names("controller_inventories")
        assert source["execution_environment"] in names("controller_execution_environments")
    launched = names("controller_templates") + names("controller_workflows")
    assert [one["name"] for one in data["controller_schedules"] if one["unified_job_template"] not in launched] == []


def test_every_playbook_has_a_template(templates):
    played = {one["playbook"] for one in templates.values()}
    assert played == {f"playbooks/{name}.yml" for name in set(specs.PLAYBOOKS) - NO_TEMPLATE}


def test_nothing_is_sliced_simultaneous_or_prompted(data, templates):
    for one in templates.values():
        assert one["job_slice_count"] == 1
        assert one["survey_enabled"] is True
    for one in [*templates.values(), *data["controller_workflows"]]:
        assert one["allow_simultaneous"] is False
        known = controller.SCHEMA["controller_templates" if one["name"] in templates else "controller_workflows"]
        prompts = {name for name in known["options"] if name.startswith("ask_")}
        assert {name: value for name, value in one.items() if name.startswith("ask_")} == dict.fromkeys(prompts, False)


def test_a_job_has_longer_than_its_playbook_may_wait(templates):
    for one in templates.values():
        longest = sum(asked.get("default", 0) for name, asked in questions(one).items() if name.endswith("_timeout"))
        assert one["timeout"] >= 4 * longest
        assert one["timeout"] > 0  # which would be for ever


def test_the_dry_run_is_the_only_check(templates):
    assert {one["playbook"] for one in templates.values() if one["job_type"] == "check"} == {"playbooks/site.yml"}
    assert [name for name, one in templates.items() if (one["job_type"] == "check") != name.endswith("dry run")] == []


def test_surveys_are_what_awx_takes(templates):
    for one in templates.values():
        survey = one["survey_spec"]
        assert list(controller.misfits(survey, controller.SCHEMA["survey"]["options"], one["name"])) == []
        assert len(questions(one)) == len(survey["spec"]) > 0
        assert len({asked["question_name"] for asked in survey["spec"]}) == len(survey["spec"])
        for asked in survey["spec"]:
            assert ("choices" in asked) == asked["type"].startswith("multi")
            if "default" in asked:
                assert controller.refused(asked, asked["default"]) == ""


def test_surveys_ask_what_the_specifications_have(templates):
    for one in templates.values():
        options = specs.options(one["playbook"].removeprefix("playbooks/").removesuffix(".yml"))
        assert set(questions(one)) == {name for name in options if not OF_INVENTORY.match(name)}


def plain(words: str) -> str:
    return re.sub(r"[CEMOV]\(([^)]*)\)", r"\1", words)


def test_questions_are_the_specifications_options(templates):
    for one in templates.values():
        options = specs.options(one["playbook"].removeprefix("playbooks/").removesuffix(".yml"))
        for name, asked in questions(one).items():
            option = options[name]
            assert asked["required"] is option.get("required", False), name
            assert asked["question_description"] == plain(option["description"]), name
            assert (asked["type"], asked.get("default"), controller.choices(asked)) == as_question(name, option), name
            if asked["type"] in ("integer", "float"):
                assert asked["min"] == (0 if FROM_ZERO.match(name) else 1), name
            if asked["type"] == "text":
                assert asked["min"] == 1, f"{name}: an empty answer is none"


def as_question(name: str, option: dict) -> tuple[str, object, list[str]]:
    """Type, default and choices of the question for an option. A survey has neither booleans nor lists of words."""
    default = option.get("default")
    if option["type"] == "list" or name == "vllm_switch_engine":
        assert default is None
        return "multiselect" if option["type"] == "list" else "multiplechoice", None, ["chat", "code"]
    if option["type"] == "bool":
        return "multiplechoice", str(default).lower(), ["false", "true"]
    if "choices" in option:
        return "multiplechoice", str(default), [str(choice) for choice in option["choices"]]
    if option["type"] in ("int", "float"):
        return {"int": "integer", "float": "float"}[option["type"]], default, []
    return "text", None if default is None else str(default), []


def launches(data) -> list[tuple[str, dict]]:
    """Whatever gives variables to a template: schedules, and nodes of workflows."""
    found = [(one["unified_job_template"], one["extra_data"]) for one in data["controller_schedules"]]
    nodes = [node for workflow in data["controller_workflows"] for node in workflow["workflow_nodes"]]
    started = [(node["unified_job_template"], node.get("extra_data", {})) for node in nodes]
    found += [(template["name"], extra) for template, extra in started if template["type"] == "job_template"]
    return found


def test_what_is_scheduled_is_asked_and_takes_that_answer(data, templates):
    given = [(templates[name], extra) for name, extra in launches(data) if name in templates]
    assert sum(len(extra) for _one, extra in given) >= 8
    for one, extra in given:
        assert set(controller.extra_vars(one["survey_spec"], extra)) >= set(extra)


RRULE = re.compile(
    r"DTSTART;TZID=UTC:(\d{8}T\d{6}) RRULE:FREQ=(MINUTELY|DAILY|WEEKLY);INTERVAL=(\d+)(;BYDAY=([A-Z]{2}))?$"
)


def test_schedules_are_rules_that_awx_takes(data):
    for one in data["controller_schedules"]:
        match = RRULE.match(one["rrule"])
        assert match, one["rrule"]
        begin = datetime.strptime(match[1], "%Y%m%dT%H%M%S")
        if match[5]:
            assert begin.strftime("%a").upper().startswith(match[5]), "it begins on another day than it repeats on"


def times(data) -> dict[str, str]:
    return {one["name"]: RRULE.match(one["rrule"])[1][-6:] for one in data["controller_schedules"]}


def test_the_weekly_roll_finds_all_awake(data):
    """Engines that sleep are held, and a roll refuses what others hold."""
    at = times(data)
    assert at["vLLM morning wake"] < at["vLLM weekly roll"] < at["vLLM night sleep"]


def test_the_morning_wakes_what_the_night_has_put_to_sleep(data):
    extra = {one["name"]: one["extra_data"] for one in data["controller_schedules"]}
    night, morning = extra["vLLM night sleep"], extra["vLLM morning wake"]
    assert night["vllm_hosts"] == morning["vllm_hosts"]
    assert night["vllm_sleep_owner"] == morning["vllm_wake_owner"]


@pytest.mark.parametrize("calendar", [False, True])
def test_either_the_calendar_or_night_and_morning(calendar):
    found = controller.variables(vllm_awx_calendar=calendar)["controller_schedules"]
    enabled = {one["name"] for one in found if one["enabled"]}
    alternatives = {"vLLM calendar"} if calendar else {"vLLM night sleep", "vLLM morning wake"}
    assert enabled == {"vLLM weekly roll", *alternatives}


@pytest.mark.parametrize("name", ["vLLM canary restart", "vLLM canary upgrade"])
def test_a_workflow_goes_from_canary_by_approval_to_the_rest(data, name):
    (workflow,) = [one for one in data["controller_workflows"] if one["name"] == name]
    nodes = {one["identifier"]: one for one in workflow["workflow_nodes"]}
    order, here = [], "canary"
    while here:
        order.append(here)
        (here,) = [one["identifier"] for one in nodes[here].get("related", {}).get("success_nodes", [])] or [""]
    assert order == ["canary", "approval", "rest"] == list(nodes)
    kinds = [nodes[name]["unified_job_template"]["type"] for name in order]
    assert kinds == ["job_template", "workflow_approval", "job_template"]
    assert nodes["approval"]["unified_job_template"]["timeout"] > 0
    for one in nodes.values():
        assert set(one.get("related", {})) <= {"success_nodes"}, "a roll that failed must not go on"
    hosts = [nodes[name]["extra_data"]["vllm_hosts"] for name in ("canary", "rest")]
    assert hosts == [data["vllm_awx_canary"], data["vllm_awx_rest"]]


@pytest.fixture(scope="module")
def inventory() -> InventoryManager:
    return InventoryManager(loader=DataLoader(), sources=[str(controller.DATA / "inventory/hosts.yml")])


def test_canary_and_rest_are_the_fleet(data, inventory):
    def hosts(pattern: str) -> set[str]:
        return {host.name for host in inventory.get_hosts(pattern)}

    canary, rest, night = (hosts(data[f"vllm_awx_{name}"]) for name in ("canary", "rest", "night"))
    assert canary and rest and night
    assert canary | rest == hosts("vllm_engines")
    assert not canary & rest
    assert night < hosts("vllm_engines"), "somebody has to serve at night"


def test_the_example_of_an_inventory_is_one_that_the_role_takes(data):
    declared = specs.load(controller.DATA / "inventory/group_vars/vllm_engines.yml")
    options = specs.load(specs.ROOT / "roles/vllm_engine/meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    instances = options["vllm_engine_instances"]["options"]
    assert [one["name"] for one in declared["vllm_engine_instances"]] == data["vllm_awx_engines"][:1]
    for one in declared["vllm_engine_instances"]:
        assert set(one) <= set(instances)
        assert {name for name, option in instances.items() if option.get("required")} <= set(one)


def test_the_key_comes_as_a_file_that_the_inventory_reads():
    (kind,) = controller.variables()["controller_credential_types"]
    for part in ("inputs", "injectors"):
        schema = controller.SCHEMA[f"credential_{part}"]["options"]
        assert list(controller.misfits(kind[part], schema, part)) == []
    assert "extra_vars" not in kind["injectors"]
    (field,) = kind["inputs"]["fields"]
    assert field["secret"] is True
    assert kind["inputs"]["required"] == [field["id"]]
    environment = kind["injectors"]["env"]
    assert [name for name in environment if name.startswith("ANSIBLE_")] == []
    fill = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string
    assert fill(kind["injectors"]["file"]["template"]).render({field["id"]: "a key"}) == "a key"
    (name,) = environment
    assert fill(environment[name]).render(tower={"filename": "/file"}) == "/file"  # and no key
    declared = (controller.DATA / "inventory/group_vars/vllm_engines.yml").read_text()
    assert f"lookup('ansible.builtin.env', '{name}')" in declared


def test_a_job_has_the_key_only_where_engines_want_one():
    for wanted in (True, False):
        found = controller.variables(vllm_awx_api_key=wanted)
        names = {kind["name"] for kind in found["controller_credential_types"]}
        has = [bool(names & set(one["credentials"])) for one in found["controller_templates"]]
        assert set(has) == {wanted}
        assert found["controller_credentials"] == []  # none is given


def test_the_page_for_operators_names_all_of_it(data):
    page = (specs.ROOT / "docs/awx.md").read_text()
    listed = re.findall(r"^\| (vLLM [^|]+) \| `(\w+)`", page, re.M)
    had = [(one["name"], one["playbook"].split("/")[1].removesuffix(".yml")) for one in data["controller_templates"]]
    assert listed == had
    table = page.partition("| variable | default | meaning |")[2].partition("\n\n")[0]
    settings = specs.load(controller.DATA / "settings.yml")
    assert sorted(re.findall(r"`(vllm_awx_\w+)`", table)) == sorted(settings)
    for kind in ("controller_workflows", "controller_schedules"):
        for one in data[kind]:
            assert f"*{one['name']}*" in page.replace("\n", " ")
    example = re.findall(r"^(vllm_awx_\w+): ", page, re.M)
    assert example
    assert set(example) <= set(settings)
