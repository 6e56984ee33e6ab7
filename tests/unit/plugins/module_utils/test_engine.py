# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the engine's client reads beside HTTP."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import api_key


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('VLLM_API_KEY="plain"', "plain"),
        ("VLLM_API_KEY=bare", "bare"),
        ("VLLM_API_KEY='single'", "single"),
        (r'VLLM_API_KEY="a\"b\\c\`d\$e=f"', 'a"b\\c`d$e=f'),
        ("OTHER_VLLM_API_KEY=no", ""),
    ],
)
def test_the_api_key_is_read_as_systemd_reads_it(tmp_path, line, key):
    path = tmp_path / "chat.env"
    path.write_text(f"# settings\nHOME=/x\n{line}\n")
    assert api_key(SimpleNamespace(env_file=str(path))) == key


def test_no_environment_file_is_no_key(tmp_path):
    assert api_key(SimpleNamespace(env_file=str(tmp_path / "none"))) == ""
