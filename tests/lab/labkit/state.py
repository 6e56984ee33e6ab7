"""What a lab made, or is about to make: written down first, so that its end finds all of it and nothing else."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from labkit import files
from labkit.plan import Lab, LabError, order

ROOT = Path("/run/baremetal-vllm-lab")
SCHEMA = 1


def directory(name: str) -> Path:
    return ROOT / name


@dataclass
class State:
    name: str
    subnet: str
    token: str  # in the name of the cgroup, so that what runs in there is ours
    bridge_mac: str  # the kernel takes it as the bridge is made: no moment at which the bridge is not marked
    disks: str
    base: str
    layers: dict[str, list[str]] = field(default_factory=dict)  # of each host, topmost first
    layer: list[str] = field(default_factory=list)  # of hosts to come
    schema: int = SCHEMA

    @classmethod
    def new(cls, lab: Lab, base: str, layer: list[str]) -> State:
        token = secrets.token_hex(8)
        mac = "02:" + ":".join(token[at : at + 2] for at in range(0, 10, 2))
        disks = files.cache() / "labs" / lab.name
        return cls(lab.name, str(lab.subnet), token, mac, str(disks), base, layer=layer)

    @property
    def lab(self) -> Lab:
        return Lab.parse(self.name, self.subnet)

    @property
    def hosts(self) -> list[str]:
        return order(self.layers)

    @property
    def directory(self) -> Path:
        return directory(self.name)

    @property
    def key(self) -> Path:
        return self.directory / "id_ed25519"

    @property
    def sockets(self) -> Path:
        return self.directory / "ssh"

    @property
    def inventory(self) -> Path:
        return self.directory / "inventory.yml"

    def save(self) -> None:
        files.write(self.directory / "state.json", json.dumps(asdict(self), indent=2) + "\n")

    def require(self, host: str) -> None:
        if host not in self.layers:
            raise LabError(f"lab {self.name} has no host {host}; it has {', '.join(self.hosts)}")


def load(name: str) -> State | None:
    try:
        text = (directory(name) / "state.json").read_text()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        schema = content["schema"]
        if schema != SCHEMA:
            raise LabError(
                f"{directory(name)}/state.json is of schema {schema}, this lab knows {SCHEMA}; "
                "end that lab with the version that made it"
            )
        return State(**content)
    except (ValueError, TypeError, KeyError) as error:
        raise LabError(f"{directory(name)}/state.json cannot be read: {error}") from error


def require(name: str) -> State:
    found = load(name)
    if found is None:
        raise LabError(f"there is no lab {name}; `lab up --name {name}` makes it")
    return found


def names() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("*/state.json"))
