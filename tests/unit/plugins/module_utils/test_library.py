# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which files a module run imports the library from: those that Ansible has sent, or the same on the host."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[4] / "plugins/module_utils/_lifecycle"
SENT = ("__init__.py", "config.py", "errors.py", "process.py", "version.py", "lease.py")
SCRIPT = """
import sys
sys.prefix = sys.argv[1]
sys.path.insert(0, sys.argv[2])
import a.b._installed
import a.b._lifecycle.version as found
print(found.__file__)
"""


@pytest.fixture
def archive(tmp_path):
    """What Ansible sends: the files that a module imports, in the packages of the collection."""
    path = tmp_path / "payload.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as payload:
        payload.writestr("a/__init__.py", "")
        payload.writestr("a/b/__init__.py", "")
        payload.write(LIBRARY.parent / "_installed.py", "a/b/_installed.py")
        for name in SENT:
            payload.write(LIBRARY / name, f"a/b/_lifecycle/{name}")
    return path


@pytest.fixture
def there(tmp_path):
    """What role vllm_host has installed: all of it."""
    directory = tmp_path / "control/lib/lifecycle/vllm_lifecycle"
    directory.mkdir(parents=True)
    for file in LIBRARY.glob("*.py"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def imported(tmp_path, archive) -> Path:
    command = [sys.executable, "-c", SCRIPT, tmp_path / "control", archive]
    own = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return Path(subprocess.run(command, check=True, capture_output=True, text=True, env=own).stdout.strip())


def test_the_same_files_on_the_host_are_imported_and_stay_compiled(tmp_path, archive, there):
    assert imported(tmp_path, archive) == there / "version.py"
    assert list((there / "__pycache__").glob("version.*.pyc"))


@pytest.mark.parametrize("name", SENT)
def test_one_byte_that_differs_and_all_is_imported_from_what_was_sent(tmp_path, archive, there, name):
    (there / name).write_bytes((there / name).read_bytes() + b"\n")
    assert imported(tmp_path, archive) == archive / "a/b/_lifecycle/version.py"


def test_a_file_that_is_missing_on_the_host(tmp_path, archive, there):
    (there / "lease.py").unlink()
    assert imported(tmp_path, archive) == archive / "a/b/_lifecycle/version.py"


def test_a_host_without_the_library(tmp_path, archive):
    assert imported(tmp_path, archive) == archive / "a/b/_lifecycle/version.py"


def test_elsewhere_it_is_imported_from_where_it_is():
    from ansible_collections.baremetal.vllm.plugins.module_utils import _installed, _lifecycle

    assert _installed._lifecycle is _lifecycle
    assert [Path(one).resolve() for one in _lifecycle.__path__] == [LIBRARY]
