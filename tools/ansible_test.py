# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run `ansible-test sanity` or `units` of several venvs on copies of the checkout; further arguments go to it.

ansible-test starts only in a real path that ends in ansible_collections/NAMESPACE/NAME, so it gets a copy below build/.
Its home lies there too, one for each venv: its caches outlive a run, and nothing is written outside the checkout.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import typing as t

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "ansible-test"
# ansible-test downloads a pip installer from a server that closed networks do not reach; Python has one of its own.
INSTALLER = "import ensurepip\n\nensurepip.bootstrap()\n"


class Command(t.NamedTuple):
    venvs: tuple[str, ...]
    arguments: tuple[str, ...]
    counted: str  # every match in the output is one test, or names how many


COMMANDS = {
    # pslint is left out: it wants PowerShell, and there is none in the collection.
    "sanity": Command((".venv", ".venv-previous", ".venv-2.16"), ("--skip-test", "pslint"), r"^Running sanity test()"),
    # The other folders of tests/unit need the tools and simulators of the checkout.
    "units": Command((".venv", ".venv-2.16"), ("--num-workers", "2", "tests/unit/plugins/"), r"\b(\d+) passed\b"),
}


def copy(target: pathlib.Path) -> None:
    """What git tracks, and what it would: the collection as a clone would have it after a commit."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    shutil.rmtree(target, ignore_errors=True)
    for name in sorted(set(os.fsdecode(listed.stdout).split("\0")) - {""}):
        source, goal = ROOT / name, target / name
        if source.is_symlink() or source.is_file():  # a file that was deleted and not yet committed is listed too
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, goal, follow_symlinks=False)
    # Without a repository of its own the copy would count as an ignored part of the checkout's: nothing to test.
    subprocess.run(("git", "init", "--quiet", str(target)), check=True)


def prepare_home(home: pathlib.Path, site: pathlib.Path) -> None:
    source = site / "ansible_test" / "_internal" / "python_requirements.py"
    versions = re.findall(r"^ +pip='([\d.]+)'", source.read_text(), re.M)
    cache = home / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for version in versions:
        (cache / f"get_pip_{version.replace('.', '_')}.py").write_text(INSTALLER)
    # A package index that is configured for this user serves ansible-test as well.
    for folder in (".config/pip", ".pip"):
        real, link = pathlib.Path.home() / folder, home / folder
        if real.is_dir() and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(real)


def start(name: str, venv: str, arguments: list[str]) -> subprocess.Popen[str]:
    site = next((ROOT / venv / "lib").glob("python3.*")) / "site-packages"
    place = BUILD / venv.lstrip(".")
    collection = place / "ansible_collections" / "baremetal" / "vllm"
    copy(collection)
    prepare_home(place / "home", site)
    path = f"{ROOT / venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    python = site.parent.name.removeprefix("python")
    command = ["ansible-test", name, "--python", python, "--color", "no", *COMMANDS[name].arguments, *arguments]
    return subprocess.Popen(
        command,
        cwd=collection,
        env={**os.environ, "HOME": str(place / "home"), "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(COMMANDS)} [ARGUMENT...]")
    name = sys.argv[1]
    failed = 0
    began = time.monotonic()
    # They run side by side, each in its own copy: less time on two cores.
    running = {venv: start(name, venv, sys.argv[2:]) for venv in COMMANDS[name].venvs}
    for venv, process in running.items():
        output, _none = process.communicate()
        log = BUILD / f"{name}-{venv.lstrip('.')}.log"
        log.write_text(output)
        tests = sum(int(number or 1) for number in re.findall(COMMANDS[name].counted, output, re.M))
        verdict = "FAILED" if process.returncode or not tests else "passed"
        if verdict == "FAILED":
            failed += 1
            print(*re.findall(r"^(?:ERROR|FATAL|FAILED|WARNING: All).*", output, re.M), sep="\n")
            print(f"the whole output: {log}")
        print(f"{name}: {verdict} in {venv}, {tests} tests, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
