"""What a lab consists of, before anything is made: names, addresses, files. Pure."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass

# The first address of each kind in the subnet, and how many of it fit.
KINDS = {"e": (11, 90), "r": (101, 100), "c": (201, 54)}
GROUPS = {"e": "vllm_engines", "r": "vllm_routers", "c": "lab_clients"}
# Host ends of veth pairs are called vb-LAB-HOST, and the kernel takes 15 characters.
NAME = re.compile(r"[a-z][a-z0-9]{0,7}")
HOST = re.compile(r"([erc])([1-9][0-9]?)")


class LabError(Exception):
    """Says what is wrong and what to do next."""


@dataclass(frozen=True)
class Lab:
    name: str
    subnet: ipaddress.IPv4Network

    @classmethod
    def parse(cls, name: str, subnet: str) -> Lab:
        if not NAME.fullmatch(name):
            raise LabError(f"--name {name}: give 1 to 8 lower-case letters and digits, a letter first")
        try:
            network = ipaddress.IPv4Network(subnet)
        except ValueError as error:
            raise LabError(f"--subnet {subnet}: {error}; give a network such as 10.77.0.0/24") from error
        if network.prefixlen > 24:
            raise LabError(f"--subnet {subnet}: too small for the lab's addresses; give a /24 or larger")
        return cls(name, network)

    @property
    def bridge(self) -> str:
        return f"vl-{self.name}"

    @property
    def gateway(self) -> ipaddress.IPv4Interface:
        return ipaddress.IPv4Interface((int(self.subnet.network_address) + 1, self.subnet.prefixlen))

    def address(self, host: str) -> ipaddress.IPv4Interface:
        kind, number = split(host)
        first, _unused = KINDS[kind]
        return ipaddress.IPv4Interface((int(self.subnet.network_address) + first + number - 1, self.subnet.prefixlen))

    def machine(self, host: str) -> str:
        return f"{self.name}-{host}"

    def veth(self, host: str) -> str:
        return f"vb-{self.machine(host)}"


def split(host: str) -> tuple[str, int]:
    match = HOST.fullmatch(host)
    if not match or int(match[2]) > KINDS[match[1]][1]:
        raise LabError(f"host {host}: a lab has engines e1 to e90, routers r1 to r99 and clients c1 to c54")
    return match[1], int(match[2])


def order(hosts: object) -> list[str]:
    return sorted(hosts, key=lambda host: ("erc".index(host[0]), int(host[1:])))


def names(engines: int, routers: int, clients: int) -> list[str]:
    made = [
        f"{kind}{number}"
        for kind, count in (("e", engines), ("r", routers), ("c", clients))
        for number in range(1, count + 1)
    ]
    for host in made:
        split(host)
    return made


def hosts_file(lab: Lab, hosts: object) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{lab.address(host).ip} {host}" for host in order(hosts)]
    return "\n".join(lines) + "\n"


def network_file(lab: Lab, host: str) -> str:
    return (
        "# Sorts before 80-container-host0.network, which would ask for DHCP.\n"
        "[Match]\nName=host0\n\n"
        "[Network]\n"
        f"Address={lab.address(host).with_prefixlen}\nGateway={lab.gateway.ip}\n"
        "IPv6AcceptRA=no\nLinkLocalAddressing=no\n"
    )


def ssh_options(sockets: str) -> list[str]:
    """Options for ssh; connections are kept under the lab's own directory, so that its end can close them."""
    settings = {
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ControlMaster": "auto",
        "ControlPersist": "60s",
        "ControlPath": f"{sockets}/%C",
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def inventory(lab: Lab, hosts: object, key: str, sockets: str) -> str:
    """An Ansible inventory; JSON is YAML, and Ansible reads it as such."""
    groups: dict[str, dict] = {name: {"hosts": {}} for name in GROUPS.values()}
    for host in order(hosts):
        groups[GROUPS[host[0]]]["hosts"][host] = {"ansible_host": str(lab.address(host).ip)}
    common = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": key,
        "ansible_ssh_common_args": " ".join(ssh_options(sockets)),
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    return json.dumps({"all": {"vars": common, "children": groups}}, indent=2) + "\n"
