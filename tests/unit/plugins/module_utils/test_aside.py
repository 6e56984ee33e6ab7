# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work in a process of its own: what its module says, what others see, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside, store
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError, UsageError

# A module's way through the interpreter: it prints, it leaves by SystemExit, and something cleans up after it.
SCRIPT = """
import os, sys, time
from {library} import aside
aside.KEPT = {kept}
def work(progress):
    progress.about("chat")("chat: works")
    time.sleep({seconds})
    {ends}
try:
    aside.run(work)
finally:
    open("cleaned", "a").write(str(os.getpid()) + " ")
"""
WELL = "print('{\"changed\": true}'); raise SystemExit(0)"


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setenv(store.ROOT_VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(
        seconds: float, *, patience: str = "0.2", ends: str = WELL, kept: float = 60
    ) -> subprocess.CompletedProcess:
        script = SCRIPT.format(library=aside.__package__, kept=kept, seconds=seconds, ends=ends)
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, aside.VARIABLE: patience},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def jobs(root: Path) -> list[Path]:
    return list((root / "run/vllm-lifecycle/jobs").glob("*"))


def wait(look, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_done_in_time_is_as_if_it_had_been_done_here(module, tmp_path):
    done = module(0, patience="60")
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"changed": true}\n', "")
    assert jobs(tmp_path) == []
    assert len((tmp_path / "cleaned").read_text().split()) == 2


def test_what_fails_in_time_too(module, tmp_path):
    done = module(0, patience="60", ends="raise ZeroDivisionError('of its own')")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.endswith("ZeroDivisionError: of its own\n")
    assert jobs(tmp_path) == []


@pytest.mark.parametrize("patience", ["", "soon"])
def test_without_anyone_who_looks_it_is_one_process(module, tmp_path, patience):
    assert module(0, patience=patience).stdout == '{"changed": true}\n'
    assert jobs(tmp_path) == []
    assert len((tmp_path / "cleaned").read_text().split()) == 1


def test_what_takes_longer_goes_on(module, tmp_path):
    begun = time.monotonic()
    done = module(3)
    assert time.monotonic() - begun < 3
    said = json.loads(done.stdout)
    (job,) = jobs(tmp_path)
    assert said == {
        "changed": False,
        "vllm_job": str(job),
        "progress": {"chat": {"says": "works", "seconds": said["progress"]["chat"]["seconds"]}},
    }
    assert not (tmp_path / "cleaned").exists(), "the archive of the module is still needed"
    assert job.stat().st_mode & 0o777 == 0o700
    seen = aside.look(str(job), 0)
    assert seen["progress"]["chat"]["says"] == "works"
    assert aside.look(str(job), 60) == (b'{"changed": true}\n', b"")
    assert len((tmp_path / "cleaned").read_text().split()) == 1
    assert aside.look(str(job), 0) == (b'{"changed": true}\n', b""), "an answer that was lost can be asked for again"


def test_a_result_that_nobody_comes_for_goes(module, tmp_path):
    module(0.5, kept=0.3)
    assert jobs(tmp_path)
    wait(lambda: not jobs(tmp_path))


def test_a_job_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"knows nothing of the job .*: it was restarted since, or nobody came for"):
        aside.look(str(tmp_path / "gone"), 10)


def test_a_process_that_was_killed(module, tmp_path):
    ends = f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    done = module(1, ends=ends)
    with pytest.raises(LifecycleError, match="was killed and has left no result; the last that it did was chat: works"):
        aside.look(json.loads(done.stdout)["vllm_job"], 60)
    at_once = module(0, patience="60", ends=ends)
    assert (at_once.returncode, at_once.stdout) == (1, "")


def test_without_a_place_for_it_the_work_is_done_here(module, tmp_path):
    (tmp_path / "run").write_text("no directory")
    done = module(0.5)
    assert (done.returncode, done.stdout) == (0, '{"changed": true}\n')
