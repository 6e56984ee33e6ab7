# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.rolling.fleet import Fleet


@pytest.fixture(scope="session")
def fleet():
    """The lab named by VLLM_LAB, on which site.yml has run: one replica on e1 and e2, an engine of its own on e3."""
    return Fleet(os.environ["VLLM_LAB"], Path(__file__).parent / "inventory")
