# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a fleet of many hosts costs its controller: status.yml and a rolling restart, beside loops of `uri`.

    .venv/bin/python benchmarks/fleet.py                                 status of 50, 200 and 500 hosts
    .venv/bin/python benchmarks/fleet.py --hosts 50 100 200 --plays rolling_restart naive_restart

Every host is a directory with a simulated engine that takes no time, and a gate that it shares with nine others; Ansible
reaches it by its local connection. So this machine does the work of the controller and of all hosts. The two are told
apart by the time on a CPU: what the hosts' interpreters used is the hosts', the rest of the run is the controller's, and
a connection by ssh comes on top of it. Within one run only the ratios count, and each wall time is that of a machine
which does both.

Writes build/fleet-report.json; times in seconds, memory in MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing as t
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ansible.plugins.loader import init_plugin_loader

init_plugin_loader()

from ansible_collections.baremetal.vllm.tests.unit.lifecycle import world  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build/fleet-report.json"
HERE = ROOT / "benchmarks"
SIM = ROOT / "tests/sim"
BEHIND_ONE_GATE = 10
# Name: playbook and arguments. The first two are floors.
PLAYS: dict[str, tuple[Path, list[str]]] = {
    "raw": (HERE / "fleet_floors.yml", ["--tags=raw"]),
    "ping": (HERE / "fleet_floors.yml", ["--tags=ping"]),
    "status": (ROOT / "playbooks/status.yml", []),
    "uri": (HERE / "fleet_uri.yml", []),
    "rolling_restart": (ROOT / "playbooks/rolling_restart.yml", ["--extra-vars=vllm_roll_batch=10%"]),
    "uri_restart": (HERE / "fleet_uri_restart.yml", ["--extra-vars=bench_batch=10%"]),
}
STANDARD = ("raw", "ping", "status", "uri")


class Gate(world.Gate):
    """One that asks its engines so seldom that it costs nothing beside the play."""

    def _render(self) -> str:
        return super()._render().replace("inter 100ms", "inter 600s")


class Host(world.World):
    """One of many, whose unit is started by the process that has all engines."""

    def __init__(self, root: Path, name: str, gate: Gate, requests: Path) -> None:
        root.mkdir()
        super().__init__(root, gate=False, gpus=0, engines=(name,), total=0)
        self.gate = gate
        self.name = name
        self.systemd.env["SIM_FLEET"] = str(requests)
        os.mkfifo(self.systemd.units / "answer")
        self.chat.socket = gate.root / "run/vllm" / name / "engine.sock"
        self.declare(
            self.chat, version="0.33.0", doors=False, dev_mode=True, fault=[], declared={}, unit={}, uuids=[]
        )

    def python(self, interpreter: str) -> str:  # type: ignore[override]
        """For the modules that run on this host. It notes what they use of a CPU."""
        given = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in self.environment.items())
        used = self.root.parent / "used"
        text = f'#!/bin/bash\n{given}{interpreter} "$@"\nstatus=$?\ntimes >>{used}/$BASHPID\nexit $status\n'
        return str(self._script("bin/python", text))


def control_python(folder: Path) -> str:
    """What role vllm_host makes: an interpreter with httpx and pynvml, and nothing that httpx would load beside them."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wanted, seen = ["httpx", "nvidia-ml-py"], set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.distribution(name)
            for top in {Path(str(file)).parts[0] for file in found.files or []}:
                place = Path(str(found.locate_file(top)))
                if place.exists() and top not in ("..", "__pycache__") and not (packages / top).exists():
                    (packages / top).symlink_to(place)
            needs = [one for one in found.requires or [] if "extra ==" not in one]
            wanted += [re.split(r"[^\w.-]", one)[0] for one in needs]
    return str(folder / "bin/python")


class Fleet:
    """Hosts that serve, from begin to end of a block."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        requests = folder / "requests"
        os.mkfifo(requests)
        (folder / "used").mkdir()
        names = [f"h{number:03d}" for number in range(1, count + 1)]
        self.gates = [
            Gate(folder / f"gate{begin}", {name: world.free_port() for name in names[begin : begin + BEHIND_ONE_GATE]})
            for begin in range(0, count, BEHIND_ONE_GATE)
        ]
        self.hosts = [
            Host(folder / name, name, self.gates[number // BEHIND_ONE_GATE], requests)
            for number, name in enumerate(names)
        ]
        interpreter = control_python(folder / "control")
        self.variables = {
            host.name: {
                "vllm_host_control_python": host.python(interpreter),
                "ansible_python_interpreter": host.python(interpreter),
                "ansible_host": "127.0.0.1",
                "vllm_engine_instances": [{"name": host.name, "port": host.gate.ports[host.name]}],
                "bench_systemctl": f"SIM_UNITS={host.systemd.units} SIM_FLEET={requests} {SIM / 'bin/systemctl'}",
            }
            for host in self.hosts
        }
        self.inventory = folder / "inventory.json"
        group = {"hosts": self.variables, "vars": {"ansible_connection": "local", "ansible_become": False}}
        self.inventory.write_text(json.dumps({"all": {"children": {"vllm_engines": group}}}))
        self.log = (folder / "engines.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SIM / "fleet.py"), str(requests)],
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def start(self) -> None:
        for gate in self.gates:
            (gate.root / "run/vllm").mkdir(exist_ok=True)
        with ThreadPoolExecutor(4) as pool:
            for started in pool.map(lambda host: host.systemd.ctl("start", host.chat.unit), self.hosts):
                assert started.returncode == 0, (self.folder / "engines.log").read_text()[-3000:]
        for gate in self.gates:
            gate.start()
            for name in gate.ports:
                world.wait_for(lambda name=name, gate=gate: _answers(gate, name), "the gate's first 200")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # its own session, with the processes that stand for engines
        self.process.wait()
        self.log.close()
        for gate in self.gates:
            gate.close()

    def used(self) -> float:
        """Seconds on a CPU of the hosts' interpreters since the last call."""
        seconds = 0.0
        for path in (self.folder / "used").iterdir():
            for minutes, rest in re.findall(r"(\d+)m([\d.]+)s", path.read_text()):
                seconds += 60 * int(minutes) + float(rest)
            path.unlink()
        return seconds

    def simulator(self) -> float:
        """Seconds on a CPU of all engines so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(one) for one in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _answers(gate: Gate, name: str) -> bool:
    try:
        return gate.ready(name) == 200
    except OSError:
        return False


class Watch:
    """The largest sum of the private memory of ansible-playbook and its workers, looked at twice a second."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mib = 0.0
        self.most = 0.0
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while (main := _pss(self.pid)) is not None:
            self.mib = max(self.mib, main)
            self.most = max(self.most, main + sum(_pss(pid) or 0 for pid in _children(self.pid)))
            time.sleep(0.5)


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _pss(pid: int) -> float | None:
    """MiB, shared pages in parts; None when it has ended."""
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


def play(fleet: Fleet, name: str, forks: int) -> dict[str, t.Any]:
    """One run, and where its seconds went."""
    book, more = PLAYS[name]
    report = fleet.folder / f"{name}.json"
    report.unlink(missing_ok=True)
    fleet.used()
    simulated = fleet.simulator()
    output = fleet.folder / f"{name}.log"
    begun, before = time.monotonic(), os.times()
    with output.open("wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "ansible-playbook"),
                f"--inventory={fleet.inventory}",
                f"--forks={forks}",
                f"--extra-vars=vllm_report_path={report}",
                *more,
                str(book),
            ],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOME": str(fleet.folder / ".ansible")},
            stdout=log,
            stderr=log,
        )
        watch = Watch(process.pid)
        status = process.wait()
    wall, after = time.monotonic() - begun, os.times()
    if status:
        raise SystemExit(f"{name} ended with {status}:\n{output.read_text()[-3000:]}")
    every = after.children_user + after.children_system - before.children_user - before.children_system
    hosts = fleet.used()
    count = len(fleet.hosts)
    return {
        "play": name,
        "hosts": count,
        "wall_s": round(wall, 2),
        "wall_s_per_host": round(wall / count, 4),
        "controller_cpu_s_per_host": round((every - hosts) / count, 4),
        "host_cpu_s_per_host": round(hosts / count, 4),
        "simulator_cpu_s_per_host": round((fleet.simulator() - simulated) / count, 4),
        "controller_mib": round(watch.mib),
        "with_workers_mib": round(watch.most),
        "load_average": round(os.getloadavg()[0], 1),
        "report": str(report) if report.exists() else "",
        "output": str(output),
    }


def table(rows: list[dict[str, t.Any]]) -> str:
    """Each play at each size, and how the time of one host grew since the smallest."""
    smallest = {row["play"]: row for row in reversed(rows)}
    line = "%-16s %6s %8s %10s %8s %14s %10s %14s %8s"
    lines = [
        line % ("PLAY", "HOSTS", "WALL_S", "S_PER_HOST", "GROWTH", "CONTROLLER_CPU", "HOST_CPU", "CONTROLLER_MIB", "WITH_ALL")
    ]
    for row in rows:
        lines.append(
            line
            % (
                row["play"],
                row["hosts"],
                f"{row['wall_s']:.1f}",
                f"{row['wall_s_per_host']:.3f}",
                f"{row['growth']:.2f}",
                f"{row['controller_cpu_s_per_host']:.3f}",
                f"{row['host_cpu_s_per_host']:.3f}",
                row["controller_mib"],
                row["with_workers_mib"],
            )
        )
    return "\n".join(lines)


@contextlib.contextmanager
def fleet_of(count: int, keep: bool = False) -> t.Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))  # short: a socket's path has 107 characters at most
    fleet = Fleet(folder, count)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def measure(counts: list[int], plays: list[str], forks: int, keep: bool = False) -> list[dict[str, t.Any]]:
    rows = []
    for count in counts:
        with fleet_of(count, keep) as fleet:
            for name in plays:
                rows.append(play(fleet, name, forks))
                print(json.dumps(rows[-1]), file=sys.stderr)
    for row in rows:
        first = next(one for one in rows if one["play"] == row["play"])
        row["growth"] = round(row["wall_s_per_host"] / first["wall_s_per_host"], 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[50, 200, 500])
    parser.add_argument("--plays", nargs="+", choices=PLAYS, default=STANDARD)
    parser.add_argument("--forks", type=int, default=10)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.hosts, arguments.plays, arguments.forks, arguments.keep)
    report = {
        "schema": "baremetal.vllm/fleet",
        "version": 1,
        "cores": len(os.sched_getaffinity(0)),
        "forks": arguments.forks,
        "rows": rows,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
