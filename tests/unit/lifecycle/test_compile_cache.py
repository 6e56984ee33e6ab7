# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A compile cache that is another's, or broken: purged, once, and told."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.compile_cache import poisoned
from ansible_collections.baremetal.vllm.plugins.modules import vllm_engine
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import wait_for

TORCH = 'File "/opt/vllm/runtimes/0.33.0/lib/python3.12/site-packages/vllm/compilation/caching.py", line 217, in call'
JOURNALS = [
    (["INFO starting", "RuntimeError: … leading to a corrupted compilation artifact. We", "exit 1"], 1),
    (["AssertionError: failed to get the hash of the compiled graph"], 0),
    ([TORCH, "AssertionError: Expected tensors only, but got: <class 'int'>"], 1),
    ([TORCH, "EOFError: Ran out of input"], 1),
    (["loading /var/cache/vllm/chat/0.33.0/vllm/torch_compile_cache/ab/rank_0_0", "_pickle.UnpicklingError: x"], 1),
    # what has nothing to do with the cache
    (["EOFError: Ran out of input"], None),
    ([TORCH, "ValueError: No available memory for the cache blocks."], None),
    (["INFO Using cache directory: /x/torch_compile_cache/ab", "torch.OutOfMemoryError: CUDA out of memory"], None),
    ([], None),
]


@pytest.mark.parametrize(("lines", "blamed"), JOURNALS)
def test_a_journal_that_blames_the_cache(lines, blamed):
    assert poisoned(lines) == ("" if blamed is None else lines[blamed])


def artifact(host):
    return host.root / "var/cache/vllm/chat/0.33.0/vllm/torch_compile_cache/artifact"


def starts(host) -> int:
    return len((host.root / "units/run" / host.chat.unit / "invocations").read_text().splitlines())


def stopped_with_a_cache(world, **settings):
    host = world(doors=True, unit={"Restart": "always", "RestartSec": 0.1}, **settings)
    host.done(vllm_engine, state="stopped")
    assert artifact(host).read_text() == "v0.33.0"
    return host


def test_a_cache_that_fits_is_kept(world):
    host = stopped_with_a_cache(world)
    written = artifact(host).stat().st_mtime_ns
    (artifact(host).parent / "more").touch()
    host.done(vllm_engine, state="started")
    assert (artifact(host).parent / "more").exists()
    assert artifact(host).stat().st_mtime_ns >= written
    assert "purged" not in host.systemd.journal(host.chat.unit)


def test_a_cache_of_another_runtime_is_purged(world):
    host = stopped_with_a_cache(world)
    packages = host.root / "opt/vllm/engines/chat/lib/python3.12/site-packages"
    (packages / "torch-2.12.0.dist-info").mkdir(parents=True)
    (artifact(host).parent / "old").touch()
    host.done(vllm_engine, state="started")
    assert not (artifact(host).parent / "old").exists()
    cache = "/var/cache/vllm/chat/0.33.0"
    assert f"chat: purged {cache}, compiled under another packages" in host.systemd.journal(host.chat.unit)


def test_a_broken_cache_is_purged_and_the_start_tried_once_more(world):
    host = stopped_with_a_cache(world)
    artifact(host).write_text("cut off")
    result = host.done(vllm_engine, state="started")
    assert result["after"]["state"] == "serving"
    assert "chat: purge its compile cache" in result["actions"]
    assert artifact(host).read_text() == "v0.33.0"
    assert "which kept it from starting: RuntimeError: vLLM failed to" in host.systemd.journal(host.chat.unit)
    # A success ends it: the next broken artifact is healed, too.
    host.done(vllm_engine, state="stopped")
    artifact(host).write_text("cut off")
    assert host.done(vllm_engine, state="started")["after"]["state"] == "serving"


def test_systemd_heals_it_without_a_play(world):
    host = stopped_with_a_cache(world)
    artifact(host).write_text("cut off")
    host.systemd.ctl("start", "--no-block", host.chat.unit)
    wait_for(lambda: host.chat.active() == "active", "the second start")
    assert artifact(host).read_text() == "v0.33.0"


def test_what_the_purge_does_not_heal_is_told_and_not_tried_for_ever(world):
    host = stopped_with_a_cache(world)
    host.chat.set_fault("start_poisoned")
    before = starts(host)
    result = host.run(vllm_engine, state="started")
    assert "did not start" in result["msg"]
    wait_for(lambda: "so the cache is not the cause" in host.systemd.journal(host.chat.unit), "the refusal")
    journal = host.systemd.journal(host.chat.unit)
    assert journal.count("chat: purged ") == 1
    assert "it failed again with a purged compile cache" in journal
    assert "corrupted compilation artifact" in journal.split("so the cache is not the cause")[1]
    assert starts(host) - before >= 2
    # Whoever has put the cause right starts it again.
    host.chat.set_fault("start_poisoned", None)
    host.done(vllm_engine, state="stopped")
    assert host.done(vllm_engine, state="started")["after"]["state"] == "serving"


def test_another_failure_leaves_the_cache_alone(world):
    host = stopped_with_a_cache(world, declared={"start_timeout": 30})
    host.chat.set_fault("start_no_kv")
    written = artifact(host).stat().st_mtime_ns
    assert host.run(vllm_engine, state="started")["failed"]
    assert artifact(host).exists() and artifact(host).stat().st_mtime_ns >= written
    assert "purged" not in host.systemd.journal(host.chat.unit)


def test_a_link_of_the_service_user_is_not_followed(world):
    host = stopped_with_a_cache(world)
    outside = host.root / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    cache = artifact(host).parents[2]
    cache.rename(host.root / "moved")
    cache.symlink_to(outside)
    (host.root / "opt/vllm/engines/chat/lib/python3.12/site-packages/new-1.dist-info").mkdir(parents=True)
    host.done(vllm_engine, state="started")
    assert (outside / "precious").exists()
    assert not cache.is_symlink()
