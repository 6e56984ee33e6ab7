# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A new configuration or runtime that does not prove itself: back to the one that was proved."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import Transition
from ansible_collections.baremetal.vllm.plugins.modules import vllm_engine
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import OWNER

RESTART = {"state": "restarted", "run": "upgrade-7", "on_failure": "rollback"}
BACK = {"state": "rolled_back", "run": "upgrade-8"}


class Site:
    """What the roles do to the files of one engine, and a look at them."""

    def __init__(self, world, **settings):
        self.host = world(gate=True, doors=True, unit={"Restart": "no"}, **settings)
        self.root = self.host.root

    def write(self, digest: str, **options) -> None:
        options_file = self.root / "etc/vllm/engines/chat.yaml"
        options_file.write_text(yaml.safe_dump({**yaml.safe_load(options_file.read_text()), **options}))
        declared = self.host.chat.declared
        declared.write_text(json.dumps({**json.loads(declared.read_text()), "config_digest": digest}))

    def runtime(self, version: str) -> None:
        """Beside the other; the simulator's interpreter is the same."""
        new = self.root / f"opt/vllm/runtimes/{version}"
        new.mkdir()
        (new / "bin").symlink_to(self.root / "opt/vllm/runtimes/0.33.0/bin")
        link = self.root / "opt/vllm/engines/chat"
        link.unlink()
        link.symlink_to(f"../runtimes/{version}")
        declared = self.host.chat.declared
        declared.write_text(json.dumps({**json.loads(declared.read_text()), "runtime_version": version}))

    def seen(self) -> dict:
        return {
            "options": yaml.safe_load((self.root / "etc/vllm/engines/chat.yaml").read_text()),
            "env": (self.root / "etc/vllm/engines/chat.env").read_text(),
            "declared": json.loads(self.host.chat.declared.read_text()),
            "runtime": os.readlink(self.root / "opt/vllm/engines/chat"),
        }


BROKEN = {"served-model-name": "other"}  # starts, and serves what was not declared


def test_a_restart_that_fails_goes_back_and_says_so(world):
    site = Site(world)
    old = site.seen()
    site.runtime("0.33.1")
    site.write("new", **BROKEN)
    result = site.host.run(vllm_engine, **RESTART)
    assert result["failed"] and result["changed"]
    assert (
        "did not start with its new configuration, went back to the older one (vLLM 0.33.0) and is serving"
        in result["msg"]
    )
    assert result["went_back_to"]["config_digest"] == "0"
    assert "serves ['other'], not 'tiny'" in "".join(result["journal"])
    assert site.seen() == old
    seen = site.host.chat.seen()
    assert (seen["unit"], seen["ready"], seen["lease"]) == ("active", True, None)
    assert site.host.chat.seen()["admission"] == "open"


def test_without_that_policy_it_stays_down(world):
    site = Site(world)
    site.write("new", **BROKEN)
    result = site.host.run(vllm_engine, **{**RESTART, "on_failure": "fail"})
    assert result["failed"] and "went_back_to" not in result
    assert site.seen()["declared"]["config_digest"] == "new"
    assert site.host.chat.active() == "failed"


def test_a_start_that_succeeds_is_what_the_next_one_goes_back_to(world):
    site = Site(world)
    site.write("second", **{"max-num-seqs": 8})
    assert not site.host.run(vllm_engine, **RESTART).get("failed")
    site.write("third", **BROKEN)
    result = site.host.run(vllm_engine, **{**RESTART, "run": "upgrade-8"})
    assert result["went_back_to"]["config_digest"] == "second"
    assert site.seen()["options"]["max-num-seqs"] == 8


def test_four_runs_of_rolled_back(world):
    site = Site(world)
    old = site.seen()
    site.runtime("0.33.1")
    site.write("new", **{"max-num-seqs": 8})
    site.host.done(vllm_engine, **RESTART)
    pid = site.host.chat.truth()["pid"]
    files = site.seen()
    predicted = site.host.done(vllm_engine, check_mode=True, **BACK)
    assert predicted["changed"]
    assert (site.seen(), site.host.chat.truth()["pid"]) == (files, pid)
    real = site.host.done(vllm_engine, **BACK)
    assert real["changed"]
    assert (predicted["before"], predicted["after"]) == (real["before"], real["after"])
    assert predicted["actions"] == real["actions"]
    assert real["went_back_to"]["runtime_version"] == "0.33.0"
    assert site.seen() == old
    assert site.host.chat.seen()["ready"]
    pid = site.host.chat.truth()["pid"]
    for check_mode in (False, True):
        again = site.host.done(vllm_engine, check_mode=check_mode, **BACK)
        assert (again["changed"], again["actions"]) == (False, [])
        assert (site.seen(), site.host.chat.truth()["pid"]) == (old, pid)


def test_there_must_be_something_to_go_back_to(world):
    site = Site(world)
    refused = site.host.run(vllm_engine, **BACK)
    assert "nothing to go back to" in refused["msg"]
    assert site.host.chat.seen()["ready"]
    assert "needs run" in site.host.run(vllm_engine, state="rolled_back")["msg"]


def test_a_configuration_that_cannot_be_read_is_no_way_back(world):
    site = Site(world)
    site.write("second", **{"max-num-seqs": 8})
    site.host.done(vllm_engine, **RESTART)
    (site.root / "var/lib/vllm/chat/generations/before/engine.env").unlink()
    before = site.seen()
    refused = site.host.run(vllm_engine, **BACK)
    assert "the configuration that it was proved with before cannot be read" in refused["msg"]
    assert refused["runbook"] == "nothing-to-go-back-to"
    assert site.seen() == before


def test_a_file_system_that_takes_no_link_is_named_and_the_next_one_goes_back(world, monkeypatch):
    site = Site(world)
    old = site.seen()
    site.write("second", **{"max-num-seqs": 8})
    site.host.done(vllm_engine, **RESTART)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "symlink_to", _full)
        failed = site.host.run(vllm_engine, **BACK)
    assert f"{site.root}/opt/vllm/engines/chat cannot be written: [Errno 28]" in failed["msg"]
    assert failed["runbook"] == "record-unwritable"
    site.host.done(vllm_engine, **BACK)
    assert site.seen() == old


def _full(*_arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_runtime_that_is_gone_is_named_before_the_files_change(world):
    site = Site(world)
    site.runtime("0.33.1")
    site.write("new", **BROKEN)
    old = site.root / "opt/vllm/runtimes/0.33.0"
    kept = old.with_name("kept")
    old.rename(kept)
    (site.root / "opt/vllm/runtimes/0.33.1/bin").unlink()
    (site.root / "opt/vllm/runtimes/0.33.1/bin").symlink_to(kept / "bin")
    before = site.seen()
    result = site.host.run(vllm_engine, **RESTART)
    assert "runtime 0.33.0, which is not on this host any more" in result["msg"]
    assert site.seen() == before
    assert site.host.chat.lease()["owner"] == OWNER


def test_secrets_are_kept_from_others(world):
    site = Site(world)
    folder = site.root / "var/lib/vllm/chat/generations/proved"
    assert sorted(path.name for path in folder.iterdir()) == [
        "engine.env",
        "engine.yaml",
        "lifecycle.json",
        "meta.json",
    ]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("step", ["stop", "roll_back", "start", "prove", "admit"])
def test_killed_after_a_step(world, step):
    site = Site(world)
    old = site.seen()
    site.write("new", **{"max-num-seqs": 8})
    site.host.done(vllm_engine, **RESTART)

    def spoil():
        before = getattr(Transition, f"_{step}")

        def deadly(self):
            before(self)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(Transition, f"_{step}", deadly)

    assert os.WIFSIGNALED(site.host.begin(vllm_engine, spoil, **BACK).wait())
    seen = site.host.chat.seen()
    assert seen["ready"] or seen["lease"] == OWNER
    site.host.run(vllm_engine, **BACK)
    seen = site.host.chat.seen()
    assert (site.seen(), seen["ready"], seen["lease"]) == (old, True, None)
