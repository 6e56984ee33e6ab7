# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the collection as it would be published, and have galaxy-importer judge it. A warning is a failure."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

from ansible_test import copy

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "galaxy"
PROGRAMS = ROOT / ".venv-previous" / "bin"
FINDING = re.compile(r"^(?:WARNING|ERROR|CRITICAL)\b.*", re.M)
# Galaxy takes no collection without an address of its source; there is no public one yet, and all else is to be judged.
STAND_IN = "repository: https://example.org/baremetal/vllm\n"
FINISHED = "Importer processing completed successfully"


def run(*argv: str, cwd: pathlib.Path) -> tuple[int, str]:
    # Its ansible-lint and ansible-doc are found on PATH, what they write lands below build/.
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    settings = {"GALAXY_IMPORTER_CONFIG": str(ROOT / "tools/galaxy-importer.cfg")}
    env = {**os.environ, **settings, "PATH": path, "HOME": str(BUILD), "TMPDIR": str(BUILD), "NO_COLOR": "1"}
    done = subprocess.run(
        argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    collection = BUILD / "source"
    copy(collection)
    metadata = (collection / "galaxy.yml").read_text()
    if not re.search(r"^repository:", metadata, re.M):
        (collection / "galaxy.yml").write_text(metadata + STAND_IN)
    code, output = run("ansible-galaxy", "collection", "build", "--output-path", str(BUILD), cwd=collection)
    artefacts = list(BUILD.glob("*.tar.gz"))
    if code or len(artefacts) != 1:
        sys.exit(f"{output}galaxy: the collection could not be built")
    code, output = run("python", "-m", "galaxy_importer.main", str(artefacts[0]), cwd=BUILD)
    (BUILD / "importer.log").write_text(output)
    findings = FINDING.findall(output)
    print(*findings, sep="\n", end="\n" if findings else "")
    if code or findings or FINISHED not in output:
        print(f"galaxy-importer: FAILED, the whole output: {BUILD / 'importer.log'}")
        return 1
    print(f"galaxy-importer: passed, {artefacts[0].name}, {artefacts[0].stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
