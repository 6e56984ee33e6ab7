"""What a role's argument specification documents is what its defaults say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROLES = sorted(path.parents[1] for path in Path(__file__).parents[3].glob("roles/*/tasks/main.yml"))


def load(path: Path):
    return yaml.safe_load(path.read_text())


@pytest.fixture(params=ROLES, ids=lambda role: role.name)
def role(request) -> Path:
    return request.param


@pytest.fixture
def options(role: Path) -> dict:
    return load(role / "meta/argument_specs.yml")["argument_specs"]["main"].get("options", {})


def test_there_are_roles():
    assert {"vllm_gate", "vllm_router"} <= {role.name for role in ROLES}


def computed(role: Path, options: dict) -> set[str]:
    """Options whose default is an expression of another type than text: a specification cannot carry it, words do."""
    defaults = load(role / "defaults/main.yml") or {}
    found = {
        name
        for name, value in defaults.items()
        if ("{{" in str(value) and options[name]["type"] not in ("str", "list")) or "default" not in options[name]
    }
    for name in found:
        assert "{{" in str(defaults[name]), f"{name}: a plain default belongs into the specification"
        assert "by default" in " ".join(options[name]["description"]).lower(), (
            f"{name}: its description names the default"
        )
    return found


def test_defaults_equal_argument_specs(role, options):
    defaults = load(role / "defaults/main.yml") or {}
    documented = {name: option["default"] for name, option in options.items() if "default" in option}
    in_words = computed(role, options)
    assert {name: value for name, value in defaults.items() if name not in in_words} == documented


def test_an_option_has_a_default_or_is_required(role, options):
    known = computed(role, options)
    lacking = [
        name
        for name, option in options.items()
        if ("default" in option or name in known) == option.get("required", False)
    ]
    assert lacking == []


def test_entry_points_are_described(role):
    for entry in load(role / "meta/argument_specs.yml")["argument_specs"].values():
        assert entry["short_description"]
        assert entry["description"]


def test_options_have_type_and_description(options):
    def lacking(level: dict, prefix: str = "") -> list[str]:
        found = []
        for name, option in level.items():
            if not (option.get("type") and option.get("description")):
                found.append(prefix + name)
            if option.get("type") == "list" and "elements" not in option:
                found.append(f"{prefix}{name} (elements)")
            found += lacking(option.get("options", {}), f"{prefix}{name}.")
        return found

    assert lacking(options) == []


def test_names_begin_with_the_name_of_the_role(role, options):
    private = load(role / "vars/main.yml") if (role / "vars/main.yml").exists() else {}
    assert [name for name in options if not name.startswith(f"{role.name}_")] == []
    assert [name for name in private if not name.startswith(f"__{role.name}_")] == []


def test_the_role_is_described_for_its_readers(role):
    readme = (role / "README.md").read_text()
    assert role.name in readme
    assert "```yaml" in readme  # an example


def test_meta_names_role_and_floor(role):
    info = load(role / "meta/main.yml")["galaxy_info"]
    assert info["role_name"] == role.name
    assert info["min_ansible_version"] == "2.16"
