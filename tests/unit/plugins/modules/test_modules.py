# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input and missing parts: each module says what is wrong before anything is touched."""

from __future__ import annotations

import json
import socket

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import http, store
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_golden,
    vllm_info,
    vllm_lora,
    vllm_page_cache,
    vllm_preload,
    vllm_reload,
    vllm_sleep,
    vllm_wake,
    vllm_watch,
)
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.test_parts import DECLARED

HOST = socket.gethostname()
CHANGES = [
    (vllm_drain, {}),
    (vllm_engine, {"state": "restarted"}),
    (vllm_sleep, {}),
    (vllm_wake, {}),
    (vllm_reload, {}),
    (vllm_lora, {}),
]
LOOKS = [(vllm_golden, {}), (vllm_watch, {}), (vllm_page_cache, {"state": "dropped"})]


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    """A host that declares the engine chat; whoever touched its state would leave files there."""
    monkeypatch.setenv(store.ROOT_VARIABLE, str(tmp_path))
    path = tmp_path / "etc/vllm/lifecycle/chat.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(DECLARED))
    yield
    assert sorted(item.name for item in tmp_path.iterdir()) == ["etc"]


@pytest.mark.parametrize(("module", "options"), [*CHANGES, *LOOKS])
def test_an_unknown_engine(run_module, module, options):
    result = run_module(module.main, engine="chta", **options)
    assert f"host {HOST} has no engine 'chta'; engines declared there: chat" in result["msg"]
    assert result["changed"] is False
    assert "baremetal.vllm.site" in result["next_step"]


@pytest.mark.parametrize(("module", "options"), [*CHANGES, (vllm_info, {}), *LOOKS])
def test_without_root(run_module, monkeypatch, module, options):
    monkeypatch.delenv(store.ROOT_VARIABLE)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    result = run_module(module.main, engine="chat", **options)
    assert f"host {HOST}: engines are seen and changed as root only, this runs as user id 1000" in result["msg"]
    assert result["next_step"] == "use become: true, or sudo"


@pytest.mark.parametrize(("module", "options"), CHANGES)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "one of the following is required: engine, engines"),
        ({"engine": "chat", "engines": ["chat"]}, "mutually exclusive"),
        ({"engines": []}, "engines is empty"),
        ({"engine": "chat", "timeout": 0}, "timeout must be above 0, not 0"),
        ({"engine": "chat", "timeout": "nan"}, "timeout must be above 0, not nan"),
        ({"engine": "chat", "lease": {"ttl": -5}}, "lease.ttl must be above 0, not -5"),
        ({"engine": "chat", "state": "asleep"}, "state"),
    ],
)
def test_wrong_options(run_module, module, options, wrong, says):
    assert says in run_module(module.main, **{**options, **wrong})["msg"]


def test_wrong_options_of_single_modules(run_module):
    assert "level must be one of" in run_module(vllm_sleep.main, engine="chat", level=9)["msg"]
    assert "max_resident_mib" in run_module(vllm_sleep.main, engine="chat", max_resident_mib=0)["msg"]
    assert "mode must be one of" in run_module(vllm_drain.main, engine="chat", mode="later")["msg"]
    assert "no preload daemon 'base'" in run_module(vllm_preload.main, daemon="base")["msg"]


@pytest.mark.parametrize(("module", "options"), [*CHANGES, (vllm_info, {}), (vllm_golden, {})])
def test_a_missing_library_names_host_interpreter_and_role(run_module, monkeypatch, module, options):
    monkeypatch.setattr(http, "httpx", None)
    monkeypatch.setattr(http, "HTTPX_IMPORT_ERROR", "Traceback: no httpx")
    monkeypatch.setattr(
        "ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.unit.Unit.show", _active_unit
    )
    result = run_module(module.main, engine="chat", check_mode=True, **options)
    assert "httpx" in result["msg"]
    assert HOST in result["msg"]
    assert "vllm_host" in result["msg"]
    assert "Traceback: no httpx" in result["import_error"]


def _active_unit(_unit):
    from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.lifecycle_factory import unit_state

    return unit_state()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seconds": -1}, "seconds must be from 0"),
        ({"max_error_share": 2}, "max_error_share must be from 0 to 1"),
        ({"since": {"chat": {"at": 1}}}, "a reading in since"),
    ],
)
def test_a_watch_of_no_sense(run_module, options, says):
    result = run_module(vllm_watch.main, engine="chat", **options)
    assert says in result["msg"]
    assert result["changed"] is False
