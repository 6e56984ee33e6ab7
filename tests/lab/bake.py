"""Makes the layer that has control environment, vLLM runtime and HAProxy installed, if need be; prints its name.

    tests/lab/lab up --layer "$(python3 tests/lab/bake.py)"

The name holds a hash of all that goes into the layer, so a change of roles or wheel lists makes another one. On hosts
that start on it, site.yml finds these parts installed, and installs what differs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from labkit import base, files, system

VERSION = "0.32.0"
LAB = "bake"
SUBNET = "10.76.0.0/24"
PARTS = (
    *(
        f"roles/{role}/{part}"
        for role in ("vllm_host", "vllm_runtime")
        for part in ("defaults", "files", "tasks", "vars")
    ),
    "tests/lab/bake.yml",
    "tests/lab/pace.py",
    "tests/lab/inventory/group_vars/all.yml",
    "tests/lab/wheels",
)


def layer_name() -> str:
    parts: list[object] = [base.key()]
    for part in PARTS:
        top = ROOT / part
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file():
                parts += [str(path.relative_to(ROOT)), path.read_bytes()]
    return f"vllm-{VERSION}-{files.digest(parts)}"


def lab(*arguments: str) -> str:
    """Its progress goes to stderr; stdout is for the name alone."""
    done = subprocess.run([str(HERE / "lab"), *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"bake: `lab {' '.join(arguments)}` failed")
    return done.stdout.strip()


def bake(layer: str) -> None:
    lab("wheels")
    lab("down", "--name", LAB)
    try:
        lab("up", "--name", LAB, "--hosts", "1", "--routers", "0", "--subnet", SUBNET)
        inventory = lab("inventory", "--name", LAB, "--path")
        playbook = Path(sys.executable).parent / "ansible-playbook"
        command = [str(playbook), "-i", inventory, "-i", str(HERE / "inventory"), str(HERE / "bake.yml")]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        if subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode:
            sys.exit("bake: bake.yml failed; its output is above")
        lab("freeze", "--name", LAB, "--from", "e1", "--as", layer)
    finally:
        lab("down", "--name", LAB)


def prune(layer: str) -> None:
    """Removes layers that are older than a day, of another hash, and under no lab: each takes gigabytes."""
    made = json.loads(lab("status", "--json"))
    used = {name for each in made for host in each["hosts"].values() for name in host["layers"]}
    for path in base.layer_path(layer).parent.glob(f"vllm-{VERSION}-*"):
        if path.name not in {layer, *used} and time.time() - path.stat().st_mtime > 86400:
            shutil.rmtree(path)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bake: terminated"))  # so that the lab is taken down
    layer = layer_name()
    with files.locked(files.cache() / "locks" / "bake"):
        if not base.layer_path(layer).is_dir():
            system.Progress()(f"layer {layer}: to be installed once, which takes minutes")
            bake(layer)
            prune(layer)
    print(layer)


if __name__ == "__main__":
    main()
