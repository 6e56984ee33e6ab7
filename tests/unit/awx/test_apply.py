# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/awx_apply.yml brings all of awx/ to the modules of awx.awx.

In the place of that collection is one made from the schema: Ansible itself then refuses what the modules would, and
each module notes what came to it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.unit.awx import controller, specs

KEY = "sk-only-for-this-test"
MODULE = '''#!/usr/bin/python
"""Notes what it is given."""
import json, os
from ansible.module_utils.basic import AnsibleModule

module = AnsibleModule(argument_spec=json.loads("""{spec}"""), supports_check_mode=True)
given = {{name: value for name, value in module.params.items() if value is not None}}
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps(["{name}", given]) + "\\n")
module.exit_json(changed=True)
'''


def make_collection(folder: Path) -> None:
    modules = folder / "ansible_collections/awx/awx/plugins/modules"
    modules.mkdir(parents=True)
    for known in (controller.SCHEMA[name] for name in controller.OBJECTS):
        name = known["module"].rpartition(".")[2]
        # Of a list of nodes the module's specification says no more, and tests of the data do.
        spec = {
            key: {word: value for word, value in controller.full(option).items() if word != "options"}
            for key, option in known["options"].items()
        }
        spec["inputs" if name == "credential" else "name"]["no_log"] = name == "credential"
        (modules / f"{name}.py").write_text(MODULE.format(spec=json.dumps(spec), name=known["module"]))


@pytest.fixture(scope="module")
def applied(tmp_path_factory) -> tuple[str, list]:
    """What Ansible said, and what came to the modules, in order."""
    folder = tmp_path_factory.mktemp("apply")
    make_collection(folder)
    collections = os.pathsep.join([str(folder), str(specs.ROOT / "build/collections")])
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "--inventory=localhost,", "-vv", "--diff",
         "--extra-vars=ansible_python_interpreter=" + sys.executable, specs.FOLDER / "awx_apply.yml"],
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": collections, "ANSIBLE_HOME": str(folder), "ANSIBLE_NOCOLOR": "1",
             "NOTES": str(folder / "notes"), "VLLM_API_KEY": KEY},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout, [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def test_every_field_of_every_object_comes_to_its_module(monkeypatch, applied):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    data = controller.variables()
    came: dict[str, list] = {}
    for module, given in applied[1]:
        came.setdefault(module, []).append(given)
    for name in controller.OBJECTS:
        wanted = [{key: value for key, value in one.items() if value != ""} for one in data[name]]
        assert came.pop(controller.SCHEMA[name]["module"]) == wanted
    assert came == {}


def test_each_comes_after_what_it_names(applied):
    modules = list(dict.fromkeys(module for module, _given in applied[1]))
    assert modules == [controller.SCHEMA[name]["module"] for name in controller.OBJECTS]


def test_the_injectors_come_unfilled(applied):
    (kind,) = [given for module, given in applied[1] if module == "awx.awx.credential_type"]
    assert kind["injectors"]["file"]["template"] == "{{ api_key }}"


def test_nobody_sees_the_key(applied):
    output, came = applied
    assert [given["inputs"] for module, given in came if module == "awx.awx.credential"] == [{"api_key": KEY}]
    assert KEY not in output


def test_the_linter_knows_the_modules_by_the_same_names():
    mocked = specs.load(specs.ROOT / ".ansible-lint")["mock_modules"]
    assert sorted(mocked) == sorted(controller.SCHEMA[name]["module"] for name in controller.OBJECTS)
    assert set(re.findall(r"awx\.awx\.\w+(?=:\n)", (specs.FOLDER / "awx_apply.yml").read_text())) == set(mocked)
