# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os

import pytest

from ansible_collections.baremetal.vllm.tests.rolling.fleet import Fleet


@pytest.fixture(scope="session")
def fleet():
    """The lab named by VLLM_LAB, on which site.yml has run."""
    return Fleet(os.environ["VLLM_LAB"])


@pytest.fixture(autouse=True)
def _all_serve(fleet):
    """Each test begins and ends with a fleet that serves as a whole: a test that breaks something mends it."""
    with fleet.whole():
        yield
