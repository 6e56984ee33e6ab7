"""Systemd hosts on a bridge of this machine, for tests: `lab up`, `lab ssh e1`, `lab down`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from labkit import base, files, labs, plan, shelf, state, system
from labkit.host import Host
from labkit.plan import Lab, LabError

SUBNET = "10.77.0.0/24"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="lab", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        if name not in ("status", "wheels"):
            made.add_argument("--name", default="lab", help="which lab (default: lab)")
        return made

    up = verb("up", "makes a lab, or what it lacks; hosts that run are left as they are")
    up.add_argument("--hosts", type=int, help="engine hosts e1 to eN (default: 3 in a new lab)")
    up.add_argument("--routers", type=int, help="router hosts r1 to rN (default: 1 in a new lab)")
    up.add_argument("--clients", type=int, default=0, help="plain hosts c1 to cN (default: 0)")
    up.add_argument("--subnet", help=f"its network (default: {SUBNET}); the bridge takes the first address")
    up.add_argument("--layer", help="start hosts on what `lab freeze` kept under this name")
    verb("down", "ends a lab and removes all that it made; the cache stays")
    ssh = verb("ssh", "logs in to a host, or runs a command there")
    ssh.add_argument("host")
    ssh.add_argument("command", nargs=argparse.REMAINDER)
    inventory = verb("inventory", "prints the Ansible inventory of a lab")
    inventory.add_argument("--path", action="store_true", help="prints where it is instead")
    verb("status", "lists labs and their hosts").add_argument("--json", action="store_true")
    freeze = verb("freeze", "keeps what was installed on a host as a layer for hosts to come")
    freeze.add_argument("--from", dest="host", required=True, metavar="HOST")
    freeze.add_argument("--as", dest="layer", required=True, metavar="LAYER")
    verb("wheels", "fetches the wheels and makes the models that hosts find under /srv")
    for name, text in (
        ("kill", "cuts a host's power: its processes end at once, its disk stays"),
        ("boot", "boots a host that does not run"),
        ("cut", "takes a host's cable off the bridge"),
        ("mend", "puts it back"),
    ):
        verb(name, text).add_argument("host")
    return top


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    progress = system.Progress()
    base.require_root()
    if options.verb == "wheels":
        shelf.make(progress)
        return 0
    if options.verb == "inventory":
        current = state.require(options.name)
        print(current.inventory if options.path else current.inventory.read_text(), end="\n" if options.path else "")
        return 0
    if options.verb == "ssh":
        current = state.require(options.name)
        current.require(options.host)
        command = options.command[options.command[:1] == ["--"] :]
        command = [shlex.join(command)] if len(command) > 1 else command
        login = Host(current, options.host).ssh(*command)
        os.execvp(login[0], login)
    system.enter_own_mounts()
    if options.verb == "status":
        show(labs.status(), options.json)
    elif options.verb == "up":
        bring_up(options, progress)
    elif options.verb == "down":
        labs.down(options.name, progress)
    elif options.verb == "freeze":
        labs.freeze(state.require(options.name), options.host, options.layer, progress)
    else:
        one_host(options, progress)
    return 0


def bring_up(options: argparse.Namespace, progress: system.Progress) -> None:
    current = state.load(options.name)
    engines = options.hosts if options.hosts is not None else 0 if current else 3
    routers = options.routers if options.routers is not None else 0 if current else 1
    subnet = options.subnet or (current.subnet if current else SUBNET)
    lab = Lab.parse(options.name, subnet)
    hosts = plan.names(engines, routers, options.clients)
    labs.up(lab, hosts, options.layer, progress, options.subnet is not None)


def one_host(options: argparse.Namespace, progress: system.Progress) -> None:
    current = state.require(options.name)
    current.require(options.host)
    host = Host(current, options.host)
    if options.verb in ("cut", "mend"):
        host.connect(options.verb == "mend")
    else:
        with files.locked(current.directory):
            if options.verb == "kill":
                host.cut_power()
            elif not host.running():
                labs.boot([host], progress)
    progress(f"{options.verb} {options.host}: done")


def show(found: list[dict], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for lab in found:
        print(f"{lab['name']}  {lab['subnet']}  {lab['inventory']}")
        for name, host in lab["hosts"].items():
            running = "running" if host["running"] else "off"
            cable = "connected" if host["connected"] else "cut"
            print(f"  {name:4} {host['address']:15} {running:8} {cable:10} {' '.join(host['layers'])}")
    if not found:
        print("no lab")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        sys.exit(f"lab: {error}")
    except KeyboardInterrupt:
        sys.exit("lab: interrupted; `lab down` removes what was made")
