"""The replay of recorded exchanges passes, and fails when the simulator lies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ansible_collections.baremetal.vllm.tests.sim.harness import HERE


@pytest.mark.parametrize(
    ("faults", "code"),
    [([], 0), (["--fault", "sleep_keeps=9000"], 1)],
    ids=["true", "memory kept"],
)
def test_replay(faults, code):
    argv = [sys.executable, str(HERE / "conformance.py"), *faults]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("sim-conformance: 171 exchanges compared, ")
    assert (" 0 differing" in last) == (code == 0)
