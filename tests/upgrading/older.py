# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The older vLLM that the lab's hosts are upgraded from: its wheels, and the lock file that the role installs it by."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAB = HERE.parent / "lab"
VERSION = "0.31.0"
WHEELS = "/var/lib/vllm-older"  # on the hosts, whose own wheelhouse is read-only

sys.path.insert(0, str(LAB))

from labkit import files, shelf, system


def wheels() -> Path:
    """The wheels that differ, fetched once."""
    wanted = HERE / "older.txt"
    directory = files.cache() / "wheelhouses" / f"older-{files.digest(files.listed(wanted))}"
    with files.made_whole(directory) as fresh:
        if fresh is not None:
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
            options += ["--abi=cp311", "--abi=abi3", "--abi=none", *(f"--platform={tag}" for tag in shelf.TAGS)]
            system.guarded(
                [sys.executable, "-m", "pip", "download", *options, f"--dest={fresh}", f"--requirement={wanted}"],
                f"pip could not fetch {wanted}",
            )
    return directory


def lock(path: Path) -> Path:
    """A complete list for role vllm_runtime: that of the lab, but for what differs."""
    other = {line.partition("==")[0]: line for line in files.listed(HERE / "older.txt")}
    lines = [other.get(line.partition("==")[0], line) for line in files.listed(LAB / "wheels/runtime.txt")]
    path.write_text("\n".join([f"--find-links {WHEELS}", *lines]) + "\n")
    return path
