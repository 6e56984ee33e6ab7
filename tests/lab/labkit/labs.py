"""What a caller can do with a lab as a whole."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import base, files, plan, shelf, state, system
from labkit.host import Host
from labkit.plan import Lab, LabError
from labkit.state import State

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = ["debootstrap", "ip", "setpriv", "ssh", "ssh-keygen", "systemd-nspawn", "unshare"]


@contextlib.contextmanager
def held(name: str) -> Iterator[None]:
    """Holds a lab against others; leaves no directory where none was begun."""
    directory = state.directory(name)
    with files.locked(directory):
        try:
            yield
        finally:
            if not (directory / "state.json").exists():
                shutil.rmtree(directory)
                remove_empty(state.ROOT)


def up(lab: Lab, hosts: list[str], layer: str | None, progress: system.Progress, subnet_given: bool) -> None:
    base.require_tools(*TOOLS)
    with held(lab.name):
        current = state.load(lab.name)
        if current is None:
            refuse_taken(lab)
            made = base.make(progress)
            current = begin(lab, made, layer)
        else:
            if subnet_given and current.subnet != str(lab.subnet):
                raise LabError(f"lab {lab.name} is there with {current.subnet}; `lab down --name {lab.name}` first")
            if layer is not None and current.layer != stack(layer, current.base):
                raise LabError(f"lab {lab.name} is there without layer {layer}; `lab down --name {lab.name}` first")
        known = set(current.layers)
        for host in hosts:
            current.layers.setdefault(host, list(current.layer))
        current.save()
        make_bridge(current)
        make_key(current)
        inventory = plan.inventory(current.lab, current.hosts, str(current.key), str(current.sockets))
        files.write(current.inventory, inventory)
        wanted = [Host(current, host) for host in current.hosts]
        running = [host for host in wanted if host.running()]
        starting = [host for host in wanted if host not in running]
        if running and set(current.layers) != known:
            for host in running:
                tell_hosts(host, plan.hosts_file(current.lab, current.hosts))
        for target in shelf.missing() if starting else []:
            progress(f"{target} will be missing in new hosts: `lab wheels` makes it")
        boot(starting, progress)
    progress(f"lab {lab.name}: {len(starting)} started, {len(running)} were running; inventory {current.inventory}")


def begin(lab: Lab, made: str, layer: str | None) -> State:
    layers = stack(layer, made) if layer else []
    new = State.new(lab, made, layers)
    disks = Path(new.disks)
    if disks.exists():  # the machine was restarted, and its /run is new
        shutil.rmtree(disks)
    new.save()
    return new


def stack(layer: str, made: str) -> list[str]:
    """A layer and those below it, topmost first."""
    path = base.layer_path(layer)
    if not path.is_dir():
        there = ", ".join(sorted(found.name for found in path.parent.glob("[!.]*"))) or "none"
        raise LabError(f"there is no layer {layer} ({there}); `lab freeze --from HOST --as {layer}` makes it")
    content = json.loads((path / "layer.json").read_text())
    if content["base"] != made:
        raise LabError(f"layer {layer} stands on base tree {content['base']}, now it is {made}; make the layer again")
    return [layer, *content["below"]]


def refuse_taken(lab: Lab) -> None:
    for link in system.links():
        if link["ifname"] == lab.bridge:
            raise LabError(f"interface {lab.bridge} is there and of no lab; remove it or use another --name")
        for address in link.get("addr_info", []):
            if address["family"] != "inet":
                continue
            taken = ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}")
            if taken.network.overlaps(lab.subnet):
                raise LabError(f"{lab.subnet} is taken: {link['ifname']} has {taken}; use another --subnet")


def make_bridge(current: State) -> None:
    lab = current.lab
    link = system.link(lab.bridge)
    if link is None:
        system.call(["ip", "link", "add", "name", lab.bridge, "address", current.bridge_mac, "type", "bridge"])
    elif link["address"] != current.bridge_mac:
        raise LabError(f"interface {lab.bridge} is not the bridge of lab {lab.name}; it was left alone")
    system.call(["ip", "address", "replace", lab.gateway.with_prefixlen, "dev", lab.bridge])
    system.call(["ip", "link", "set", "dev", lab.bridge, "alias", f"baremetal-vllm-lab {lab.name}", "up"])


def make_key(current: State) -> None:
    current.sockets.mkdir(mode=0o700, exist_ok=True)
    if Path(f"{current.key}.pub").exists():
        return
    current.key.unlink(missing_ok=True)
    system.call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {current.name}", "-f", str(current.key)])


def tell_hosts(host: Host, text: str) -> None:
    done = subprocess.run(
        host.ssh("cat > /etc/hosts"), check=False, input=text, text=True, capture_output=True, timeout=30
    )
    if done.returncode:
        raise LabError(f"{host.name} did not take its new /etc/hosts: {done.stderr.strip()}")


def boot(hosts: list[Host], progress: system.Progress) -> None:
    if not hosts:
        return
    progress(f"boots: {' '.join(host.name for host in hosts)}")

    def one(host: Host) -> None:
        host.configure()
        host.start()
        said = host.wait_booted()
        progress(f"{host.name} {host.address}: {said}")

    with ThreadPoolExecutor(len(hosts)) as pool:
        results = [pool.submit(one, host) for host in hosts]
    failures = [str(result.exception()) for result in results if result.exception()]
    if failures:
        raise LabError("\n".join(failures))


def down(name: str, progress: system.Progress) -> None:
    plan.Lab.parse(name, "10.77.0.0/24")
    files.sweep_idle(files.cache())
    disks = files.cache() / "labs" / name
    if not state.directory(name).is_dir() and not disks.is_dir():
        progress(f"there is no lab {name}")
        return
    with held(name):
        current = state.load(name)
        if current is not None:
            end(current, progress)
            disks = Path(current.disks)
        if disks.is_dir():
            shutil.rmtree(disks)
        remove_empty(disks.parent)
        # The state goes last: whatever stops us before, the next `down` knows what is left.
        (state.directory(name) / "state.json").unlink(missing_ok=True)
    progress(f"lab {name} is gone")


def end(current: State, progress: system.Progress) -> None:
    for socket in current.sockets.glob("*"):
        subprocess.run(["ssh", "-O", "exit", "-o", f"ControlPath={socket}", "lab"], check=False, capture_output=True)
    hosts = [Host(current, host) for host in current.hosts]
    if hosts:
        progress(f"ends: {' '.join(host.name for host in hosts)}")
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(Host.cut_power, hosts))
        top = hosts[0].cgroup.parent
        if top.is_dir():
            top.rmdir()
    bridge = system.link(current.lab.bridge)
    if bridge is None:
        return
    if bridge["address"] == current.bridge_mac:
        system.call(["ip", "link", "delete", "dev", current.lab.bridge, "type", "bridge"])
    else:
        progress(f"interface {current.lab.bridge} is not ours: left alone")


def remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def freeze(current: State, name: str, layer: str, progress: system.Progress) -> None:
    current.require(name)
    host = Host(current, name)
    with files.locked(current.directory), files.made_whole(base.layer_path(layer)) as target:
        if target is None:
            progress(f"layer {layer} is there")
            return
        if host.running():
            progress(f"{name} powers off")
            host.power_off()
        below = current.layers[name]
        host.to_layer(target)
        files.write(target / "layer.json", json.dumps({"base": current.base, "below": below}) + "\n")
        current.layers[name] = [layer, *below]
        current.save()
    progress(f"layer {layer} is made; {name} is off, `lab boot {name}` starts it afresh on top of it")


def status() -> list[dict]:
    found = []
    for name in state.names():
        current = state.require(name)
        hosts = [Host(current, host) for host in current.hosts]
        found.append(
            {
                "name": name,
                "subnet": current.subnet,
                "inventory": str(current.inventory),
                "hosts": {
                    host.name: {
                        "address": host.address,
                        "running": host.running(),
                        "connected": (system.link(host.veth) or {}).get("master") == current.lab.bridge,
                        "layers": current.layers[host.name],
                    }
                    for host in hosts
                },
            }
        )
    return found
