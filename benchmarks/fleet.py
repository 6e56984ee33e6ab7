# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a fleet of many hosts costs its controller: status.yml and a rolling restart, beside loops of `uri`.

    .venv/bin/python benchmarks/fleet.py                          status of 50, 200 and 500 hosts
    .venv/bin/python benchmarks/fleet.py --hosts 50 200 --plays rolling_restart uri_restart

Every host is a directory with a simulated engine that takes no time, and a gate shared with nine others. Ansible
reaches it by its local connection, so this machine works for the controller and for all hosts. They are told apart in
two ways: by the time on a CPU, where what the hosts' interpreters use is the hosts' and the rest the controller's; and
by a second run, "/elsewhere", in which each host repeats at once what it said in the first, as if it had worked on
processors of its own. What a connection by ssh costs comes on top of both. Only figures of one run may be compared.

Writes build/fleet-report.json; times in seconds, memory in MiB.
"""

from __future__ import annotations

import argparse
import compileall
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

from ansible_collections.baremetal.vllm.tests.unit.lifecycle import world

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build/fleet-report.json"
HERE = ROOT / "benchmarks"
SIM = ROOT / "tests/sim"
LIBRARY = ROOT / "plugins/module_utils/_lifecycle"
BEHIND_ONE_GATE = 10
# Name: playbook and arguments. The first two are floors.
PLAYS: dict[str, tuple[Path, list[str]]] = {
    "raw": (HERE / "fleet_floors.yml", ["--tags=raw"]),
    "ping": (HERE / "fleet_floors.yml", ["--tags=ping"]),
    "status": (ROOT / "playbooks/status.yml", []),
    "uri": (HERE / "fleet_uri.yml", []),
    "rolling_restart": (ROOT / "playbooks/rolling_restart.yml", []),
    "uri_restart": (HERE / "fleet_uri_restart.yml", []),
}
STANDARD = ("raw", "ping", "status", "uri")
REPEATABLE = ("ping", "status", "uri")  # one module on each host


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
        self.declare(self.chat, version="0.33.0", doors=False, dev_mode=True, fault=[], declared={}, unit={}, uuids=[])

    def python(self, interpreter: str) -> str:  # type: ignore[override]
        """For the modules that run on this host: it notes what they use of a CPU, and can repeat the last answer."""
        given = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in self.environment.items())
        top, answer = self.root.parent, self.root / "answer"
        text = f"""#!/bin/bash
if [[ -e {top}/elsewhere ]]; then
    cat >/dev/null
    exec cat {answer}
fi
{given}{interpreter} "$@" >{answer}
status=$?
times >>{top}/used/$BASHPID
cat {answer}
exit $status
"""
        return str(self._script("bin/python", text))


def control_python(folder: Path) -> str:
    """As role vllm_host makes it: httpx and pynvml with what they need and no more, and the library, compiled."""
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
    library = shutil.copytree(LIBRARY, folder / "lib/lifecycle/vllm_lifecycle")
    compileall.compile_dir(library, quiet=1)
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
                "vllm_engine_instances": [
                    {"name": host.name, "model": "/srv/models/tiny", "port": host.gate.ports[host.name]}
                ],
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
                if started.returncode:
                    raise SystemExit((self.folder / "engines.log").read_text()[-3000:])
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


def play(fleet: Fleet, name: str, forks: int, batch: str, elsewhere: bool = False) -> dict[str, t.Any]:
    """One run, and where its seconds went. ``elsewhere``: the hosts repeat what they said in the run before."""
    book, more = PLAYS[name]
    report = fleet.folder / f"{name}.json"
    report.unlink(missing_ok=True)
    output = fleet.folder / f"{name}.log"
    switch = fleet.folder / "elsewhere"
    switch.touch() if elsewhere else switch.unlink(missing_ok=True)
    fleet.used()
    simulated = fleet.simulator()
    begun, before = time.monotonic(), os.times()
    with output.open("wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "ansible-playbook"),
                f"--inventory={fleet.inventory}",
                f"--forks={forks}",
                f"--extra-vars=vllm_report_path={report} vllm_roll_batch={batch}",
                *more,
                str(book),
            ],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOME": str(fleet.folder / ".ansible")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        watch = Watch(process.pid)
        try:
            status = process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    wall, after = time.monotonic() - begun, os.times()
    if status:
        raise SystemExit(f"{name} ended with {status}:\n{output.read_text()[-3000:]}")
    every = after.children_user + after.children_system - before.children_user - before.children_system
    hosts = fleet.used()
    count = len(fleet.hosts)
    return {
        "play": f"{name}/elsewhere" if elsewhere else name,
        "hosts": count,
        "wall_s": round(wall, 2),
        "wall_s_per_host": round(wall / count, 4),
        "controller_cpu_s_per_host": round((every - hosts) / count, 4),
        "host_cpu_s_per_host": round(hosts / count, 4),
        "simulator_cpu_s_per_host": round((fleet.simulator() - simulated) / count, 4),
        "controller_mib": round(watch.mib),
        "with_workers_mib": round(watch.most),
        "load_average": round(os.getloadavg()[0], 1),
    }


COLUMNS = {
    "HOSTS": "hosts",
    "WALL_S": "wall_s",
    "S_PER_HOST": "wall_s_per_host",
    "GROWTH": "growth",
    "CONTROLLER_CPU_S": "controller_cpu_s_per_host",
    "HOST_CPU_S": "host_cpu_s_per_host",
    "CONTROLLER_MIB": "controller_mib",
    "WITH_WORKERS": "with_workers_mib",
}


def table(rows: list[dict[str, t.Any]]) -> str:
    """A line for each play and size. Times on a CPU are those of one host."""
    lines = [("PLAY", *COLUMNS), *((row["play"], *(row[key] for key in COLUMNS.values())) for row in rows)]
    line = "%-18s %6s %8s %11s %7s %17s %11s %15s %13s"
    return "\n".join(line % one for one in lines)


@contextlib.contextmanager
def fleet_of(count: int) -> t.Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))  # short: a socket's path has 107 characters at most
    fleet = Fleet(folder, count)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


def measure(counts: list[int], plays: t.Sequence[str], forks: int, batch: str) -> list[dict[str, t.Any]]:
    """All plays on fleets of each size. ``growth`` is the time of one host as a multiple of that in the first fleet."""
    rows: list[dict[str, t.Any]] = []
    for count in counts:
        with fleet_of(count) as fleet:
            for name in plays:
                for elsewhere in (False, True) if name in REPEATABLE else (False,):
                    rows.append(play(fleet, name, forks, batch, elsewhere))
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
    parser.add_argument("--batch", default="10%", help="of a rolling restart")
    arguments = parser.parse_args()
    rows = measure(arguments.hosts, arguments.plays, arguments.forks, arguments.batch)
    report = {
        "schema": "baremetal.vllm/fleet",
        "version": 1,
        "cores": len(os.sched_getaffinity(0)),
        "forks": arguments.forks,
        "batch": arguments.batch,
        "rows": rows,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
