# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""execution-environment.yml, as far as it goes without a container engine.

ansible-builder makes the build context of it; the steps of the build that need no container are done by hand; and what
it pins, alone in a fresh environment, is enough for every playbook.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.tests.unit.awx.test_apply import make_collection

CHECKOUT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DEFINITION = yaml.safe_load((CHECKOUT / "execution-environment.yml").read_text())
PINS = (CHECKOUT / "requirements/ee.txt").read_text().splitlines()


def run(*argv: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        argv, cwd=cwd, env={"PATH": os.environ["PATH"], "HOME": str(cwd), "ANSIBLE_NOCOLOR": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Path:
    """The build context, made from a checkout with nothing in it but what the definition names."""
    folder = tmp_path_factory.mktemp("ee")
    for name in (
        "execution-environment.yml",
        DEFINITION["dependencies"]["python"],
        DEFINITION["dependencies"]["system"],
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / name)
    run(
        BIN / "ansible-galaxy", "collection", "build", "--output-path", folder / "build", cwd=CHECKOUT, HOME=str(folder)
    )
    run(BIN / "ansible-builder", "create", cwd=folder)
    return folder / "context"


@pytest.fixture(scope="module")
def collections(context) -> Path:
    """As the build's galaxy stage installs them, from the folder and with the file that it has there."""
    folder = context.parent / "collections"
    # By force, since it is there already: as a link beside the packages of this environment.
    command = (BIN / "ansible-galaxy", "collection", "install", "--offline", "--force", "-r", "requirements.yml")
    run(*command, "--collections-path", folder, cwd=context / "_build")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A fresh Python environment with what is pinned, and nothing else."""
    folder = tmp_path_factory.mktemp("pins") / "venv"
    run(sys._base_executable, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet")
    inherited = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP"))}
    home = {"HOME": os.environ.get("HOME", "/root")}  # where pip is told its index
    run(
        *pip, "install", "--no-deps", "--requirement", CHECKOUT / "requirements/ee.txt", cwd=folder, **inherited, **home
    )
    run(*pip, "check", cwd=folder)
    return folder / "bin"


def test_the_image_gets_the_collection_at_its_version(collections):
    manifest = json.loads((collections / "ansible_collections/baremetal/vllm/MANIFEST.json").read_text())
    assert manifest["collection_info"]["version"] == yaml.safe_load((CHECKOUT / "galaxy.yml").read_text())["version"]


def test_the_image_installs_what_is_pinned(context):
    assert [pin for pin in PINS if not re.match(r"[\w-]+==[\w.]+( ;|$)", pin)] == []
    (containerfile,) = [path for path in context.iterdir() if path.is_file()]
    (refs,) = re.findall(r'ANSIBLE_INSTALL_REFS="(.+)"', containerfile.read_text())
    assert set(refs.split()) <= set(PINS)
    assert (context / "_build/requirements.txt").read_text().split() == "\n".join(PINS).split()


def test_what_the_collection_asks_for_is_in_it(context, collections):
    """By the script of the build, which reads meta/execution-environment.yml where the collection is installed."""
    combined = context.parent / "combined.txt"
    system = context.parent / "bindep.txt"
    run(sys.executable, "_build/scripts/introspect.py", "introspect", "--user-pip=_build/requirements.txt",
        "--user-bindep=_build/bindep.txt", f"--write-pip={combined}", f"--write-bindep={system}", collections,
        cwd=context)  # fmt: skip
    assert re.search(r"^tzdata .*baremetal\.vllm", combined.read_text(), re.M)
    assert re.search(r"^openssh-clients \[platform:rpm\].*baremetal\.vllm", system.read_text(), re.M)
    asked = re.findall(r"^([\w-]+)", (CHECKOUT / "meta/ee-requirements.txt").read_text(), re.M)
    assert set(asked) <= {pin.partition("==")[0] for pin in PINS}


def test_the_pins_are_those_of_the_development_environment():
    """What the tests have seen is what the image has."""
    development = set((CHECKOUT / "requirements/dev.txt").read_text().splitlines())
    versions = {line.partition(" ;")[0] for line in development}
    strange = {pin.partition(" ;")[0] for pin in PINS} - versions
    assert {pin.partition("==")[0] for pin in strange} <= {"tzdata"}


def test_every_playbook_is_understood_there(environment, collections, tmp_path):
    make_collection(tmp_path)  # awx.awx, which is for whoever sets AWX up, not for its jobs
    folder = collections / "ansible_collections/baremetal/vllm/playbooks"
    playbooks = sorted(path for path in folder.glob("*.yml") if not path.name.endswith(".meta.yml"))
    assert {"site.yml", "rolling_restart.yml", "awx_apply.yml"} <= {path.name for path in playbooks}
    paths = os.pathsep.join([str(collections), str(tmp_path)])
    output = run(environment / "ansible-playbook", "--syntax-check", "--inventory=localhost,", *playbooks,
                 cwd=tmp_path, ANSIBLE_COLLECTIONS_PATH=paths)  # fmt: skip
    assert len(re.findall(r"^playbook: ", output, re.M)) == len(playbooks)
    assert "ERROR" not in output


def test_the_calendar_knows_time_zones_there(environment, collections, tmp_path):
    """With none of the machine's own, as small images have none."""
    window = "[{'name': 'day', 'from': '08:00', 'to': '20:00', 'timezone': 'Europe/Berlin', 'awake': ['chat']}]"
    expression = f"{{{{ ({window} | baremetal.vllm.vllm_calendar('2026-03-29T06:30:00+00:00')).awake }}}}"
    command = (
        environment / "ansible",
        "localhost",
        "--inventory=localhost,",
        "--connection=local",
        "--module-name=debug",
    )
    paths = {"ANSIBLE_COLLECTIONS_PATH": str(collections), "PYTHONTZPATH": ""}
    output = run(*command, f"--args=msg={json.dumps(expression)}", cwd=tmp_path, **paths)
    assert '"chat"' in output


def test_the_runner_is_there(environment, tmp_path):
    pinned = next(pin for pin in PINS if pin.startswith("ansible-runner==")).partition("==")[2]
    assert run(environment / "ansible-runner", "--version", cwd=tmp_path).strip() == pinned
