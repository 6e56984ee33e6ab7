# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Install what `make test` and `make demo` need: Debian packages and three venvs. Run again, it does nothing."""

from __future__ import annotations

import glob
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
import typing as t

ROOT = pathlib.Path(__file__).resolve().parent.parent
APT_LISTS = ("requirements/apt.txt", "tests/apt.txt", "tests/lab/apt.txt")
# venv, its lock file, and the Python versions that the lock file takes, best first
VENVS = (
    (".venv", "requirements/dev.txt", ("3.14", "3.13", "3.12", "3.11")),
    (".venv-previous", "requirements/previous.txt", ("3.14", "3.13", "3.12", "3.11")),
    (".venv-2.16", "requirements/floor.txt", ("3.12", "3.11", "3.10")),
)
COLLECTION = "ansible_collections/baremetal/vllm"


def say(text: str) -> None:
    print(f"deps: {text}", flush=True)


def die(text: str) -> t.NoReturn:
    sys.exit(f"deps: {text}")


def run(*argv: str, env: dict[str, str] | None = None) -> None:
    """Quiet while it works; the whole output when it fails."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    if done.returncode:
        die(f"`{' '.join(argv)}` ended with {done.returncode}:\n{done.stdout}")


def listed(name: str) -> list[str]:
    path = ROOT / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [word for line in lines if (word := line.split("#")[0].strip())]


def installed(package: str) -> bool:
    query = ("dpkg-query", "--show", "--showformat=${db:Status-Status}", package)
    done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout == "installed"


def apt(packages: list[str]) -> None:
    if not shutil.which("dpkg-query"):
        die(f"this is no Debian machine; install the equivalents of: {' '.join(packages)}")
    missing = [package for package in packages if not installed(package)]
    if not missing:
        return
    if os.geteuid() != 0:
        die(f"not root, and these packages are missing. Run: sudo apt-get install {' '.join(missing)}")
    say(f"apt-get install {' '.join(missing)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-q", env=env)
    run("apt-get", "install", "-q", "--yes", "--no-install-recommends", *missing, env=env)


def candidates(version: str) -> list[str]:
    """Where a Python of this version may lie: PATH, the usual folders, pyenv."""
    name = f"python{version}"
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/bin", "/usr/bin"]
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = [os.path.join(folder, name) for folder in folders]
    return found + sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/{name}"), reverse=True)


def probe(path: str, version: str) -> str:
    """The real path of this interpreter; "" for a pyenv shim that is switched off, and for the Python of a venv."""
    code = "import os, sys; print('%d.%d' % sys.version_info[:2], sys.prefix == sys.base_prefix, end=' ')"
    code += "; print(os.path.realpath(sys.executable))"
    if not os.access(path, os.X_OK):
        return ""
    done = subprocess.run((path, "-c", code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    head, _space, executable = done.stdout.strip().rpartition(" ")
    return executable if head == f"{version} True" else ""


def find_python(versions: tuple[str, ...], venv: str) -> tuple[str, str]:
    for version in versions:
        for path in candidates(version):
            if python := probe(path, version):
                return version, python
    die(f"{venv} needs Python {' or '.join(versions)}, and none is on PATH, in /usr/local/bin, in /usr/bin or in pyenv")


def has_venv(python: str) -> bool:
    done = subprocess.run((python, "-c", "import ensurepip, venv"), stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def make_venv(name: str, lock: str, version: str, python: str) -> None:
    venv = ROOT / name
    key = hashlib.sha256(f"{ROOT} {python} {version}\n".encode() + (ROOT / lock).read_bytes()).hexdigest()
    stamp = venv / ".stamp"
    if not (stamp.exists() and stamp.read_text() == key):
        say(f"{name}: {lock} with Python {version} ({python})")
        run(python, "-m", "venv", "--clear", str(venv))
        pip = (f"{venv}/bin/python", "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "--quiet", "--no-deps", "--requirement", str(ROOT / lock))
        run(*pip, "check")
        stamp.write_text(key)
    link = venv / "lib" / f"python{version}" / "site-packages" / COLLECTION
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(ROOT, link.parent)
    if not (link.is_symlink() and os.readlink(link) == target):
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def main() -> None:
    began = time.monotonic()
    chosen = [(name, lock, *find_python(versions, name)) for name, lock, versions in VENVS]
    packages = [package for apt_list in APT_LISTS for package in listed(apt_list)]
    # Debian ships the venv module apart from its Python; a Python from elsewhere brings its own.
    packages += [f"python{version}-venv" for _name, _lock, version, python in chosen if not has_venv(python)]
    apt(sorted(set(packages)))
    for name, lock, version, python in chosen:
        make_venv(name, lock, version, python)
    if chosen[0][2] == "3.11":
        say("no Python 3.12 or newer here, so .venv has the last ansible-core that takes 3.11, not the current one")
    say(f"ready after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
