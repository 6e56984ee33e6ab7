# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the unit tests share."""

from __future__ import annotations

import json

import hypothesis
import pytest
from ansible import module_utils
from ansible.module_utils import basic

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import gpu

# A busy machine is no fault of what is tested.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


@pytest.fixture
def run_module(monkeypatch, capfd):
    """`run_module(main, engine="chat", check_mode=True)` is the result that the module prints."""

    def run(main, *, check_mode=False, diff=False, **options):
        arguments = {**options, "_ansible_check_mode": check_mode, "_ansible_diff": diff}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)  # unknown before 2.19
        if hasattr(module_utils, "_internal"):  # since 2.19
            # As on a host: tests also load what only a controller has, where warnings do not go into the result.
            monkeypatch.setattr(module_utils._internal, "is_controller", False)
        gpu._opened.clear()  # a module is a process of its own, and finds no NVML open
        with pytest.raises(SystemExit) as stopped:
            main()
        result = json.loads(capfd.readouterr().out)
        assert bool(stopped.value.code) == result.get("failed", False), "exit code and result disagree"
        return result

    return run
