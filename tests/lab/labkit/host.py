"""One host: its disk, its processes, its network cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import base, files, plan, shelf, system
from labkit.plan import LabError

if TYPE_CHECKING:
    from labkit.state import State

BOOT_DEADLINE = 90

# The mounts are the host's own and end with it. Joining the cgroup comes first: it fails when the lab has been taken
# down meanwhile. The empty /run keeps out of the machine's what systemd-nspawn writes there.
# It ends with 133 when the host reboots.
UNSHARE = ["unshare", "--mount", "--propagation", "private"]
START = """
echo $$ > "$1/cgroup.procs"
mount -t overlay -o "lowerdir=$2,upperdir=$3/upper,workdir=$3/work" lab "$3/root"
mount -t tmpfs -o mode=755 lab /run
shift 3
code=133
while [ "$code" = 133 ]; do
    code=0
    systemd-nspawn "$@" || code=$?
done
exit "$code"
"""
LOGIN_ONCE = ["-o", "ControlPath=none", "-o", "ConnectTimeout=1", "-o", "BatchMode=yes"]
# Left out of a layer: what belongs to one host, and what it did rather than what it has installed.
UNIQUE_FILES = [
    *base.UNIQUE,
    "etc/systemd/network/10-lab.network",
    "var/lib/systemd/random-seed",
]
UNIQUE_TREES = ["root/.ssh", "root/.ansible", "var/lib/vllm", "var/log", "run", "tmp", "var/tmp"]


class Host:
    def __init__(self, state: State, name: str) -> None:
        self.state = state
        self.name = name
        self.disk = Path(state.disks) / name
        self.cgroup = system.CGROUPS / f"baremetal-vllm-lab.{state.name}.{state.token}" / name
        self.address = str(state.lab.address(name).ip)
        self.veth = state.lab.veth(name)

    def running(self) -> bool:
        return bool(system.cgroup_pids(self.cgroup))

    def configure(self) -> None:
        """Writes on the disk of a host that does not run what makes it this host."""
        upper = self.disk / "upper"
        for directory in ("upper", "work", "root"):
            (self.disk / directory).mkdir(parents=True, exist_ok=True)
        for directory, mode in (
            ("etc", 0o755),
            ("etc/ssh", 0o755),
            ("etc/systemd", 0o755),
            ("etc/systemd/network", 0o755),
            ("root", 0o700),
            ("root/.ssh", 0o700),
        ):
            (upper / directory).mkdir(exist_ok=True)
            (upper / directory).chmod(mode)
        state = self.state
        files.write(upper / "etc/hostname", f"{self.name}\n")
        files.write(upper / "etc/hosts", plan.hosts_file(state.lab, state.hosts))
        files.write(upper / "etc/resolv.conf", "# No network but the lab's: names are in /etc/hosts.\n")
        files.write(upper / "etc/systemd/network/10-lab.network", plan.network_file(state.lab, self.name))
        files.write(upper / "root/.ssh/authorized_keys", Path(f"{state.key}.pub").read_text(), 0o600)
        if not (upper / "etc/machine-id").exists():
            files.write(upper / "etc/machine-id", f"{uuid.uuid4().hex}\n", 0o444)
        host_key = upper / "etc/ssh/ssh_host_ed25519_key"
        if not host_key.exists():
            system.call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(host_key)])

    def start(self) -> None:
        state = self.state
        lower = base.lower(state.base, state.layers[self.name])
        system.make_cgroup(self.cgroup)
        arguments = [
            "--quiet",
            "--boot",
            "--keep-unit",
            "--register=no",
            "--settings=no",
            f"--machine={state.lab.machine(self.name)}",
            f"--hostname={self.name}",
            f"--directory={self.disk}/root",
            f"--network-bridge={state.lab.bridge}",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            "--console=read-only",
            "--rlimit=NOFILE=1024:524288",  # what a booted system has
            *(f"--bind-ro={source}:{target}" for source, target in shelf.ready()),
        ]
        with (self.disk / "console.log").open("ab") as console:
            self.process = subprocess.Popen(
                [*UNSHARE, "sh", "-ec", START, "sh", str(self.cgroup), lower, str(self.disk), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def ssh(self, *command: str, options: list[str] | None = None) -> list[str]:
        common = plan.ssh_options(str(self.state.sockets))
        key = ["-i", str(self.state.key)]
        return [*system.TIED, "ssh", *(options or []), *common, *key, f"root@{self.address}", *command]

    def wait_booted(self) -> str:
        """Waits for a login over ssh and the end of the boot; returns what systemd says of it."""
        deadline = time.monotonic() + BOOT_DEADLINE
        login = self.ssh("systemctl is-system-running --wait", options=LOGIN_ONCE)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LabError(f"{self.name} ({self.address}) took no login within {BOOT_DEADLINE} s{self.console()}")
            if self.process.poll() is not None:
                raise LabError(f"{self.name} ended while booting{self.console()}")
            try:
                done = subprocess.run(
                    login, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left
                )
            except subprocess.TimeoutExpired:
                continue
            if done.stdout.strip():
                return done.stdout.strip()
            time.sleep(0.1)

    def console(self) -> str:
        try:
            tail = (self.disk / "console.log").read_text(errors="replace").splitlines()[-15:]
        except FileNotFoundError:
            return ""
        return f"; the end of {self.disk}/console.log:\n  " + "\n  ".join(tail)

    def cut_power(self) -> None:
        system.kill_cgroup(self.cgroup)
        system.until(lambda: system.link(self.veth) is None, 20, f"{self.veth} of {self.name} does not go away")

    def power_off(self) -> None:
        """Shuts down the way an operator does, so that what is on the disk is complete."""
        subprocess.run(
            self.ssh("systemctl", "poweroff"), check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=30
        )
        system.until(lambda: not self.running(), BOOT_DEADLINE, f"{self.name} does not power off", every=0.2)
        self.cut_power()

    def connect(self, connected: bool) -> None:
        if system.link(self.veth) is None:
            raise LabError(f"{self.name} does not run; `lab boot {self.name}` starts it")
        master = ["master", self.state.lab.bridge] if connected else ["nomaster"]
        system.call(["ip", "link", "set", "dev", self.veth, *master])

    def to_layer(self, target: Path) -> None:
        """Turns the disk of a host that does not run into a layer for others; the host starts over, on top of it."""
        tree = target / "tree"
        (self.disk / "upper").rename(tree)
        shutil.rmtree(self.disk / "work")
        for name in UNIQUE_FILES:
            (tree / name).unlink(missing_ok=True)
        for secret in (tree / "etc/ssh").glob("ssh_host_*"):
            secret.unlink()
        for name in UNIQUE_TREES:
            for directory, _unused, names in os.walk(tree / name):
                for file in names:
                    (Path(directory) / file).unlink()
