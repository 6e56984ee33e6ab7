# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rolls a fleet of three engines with real vLLM under streaming clients, first by our playbook, then by a naive one.

Makes what it needs (wheels, base tree, a layer with the runtime) and a lab of three engine hosts and a router, which it
takes down at the end. Writes build/roll-report.json, with what the clients saw in build/load-ours.json and
build/load-naive.json, prints a table, and fails when one of its claims does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
LOGS = BUILD / "demo"
LAB = ROOT / "tests" / "lab" / "lab"
sys.path.insert(0, str(LAB.parent))

from labkit import files

HOSTS = 3
MODEL = "tiny"
MIX = "short=8-40:5,long=200-400:1"
STREAMS = 8
MIN_REQUESTS = 200
# Of the time out of rotation, as what is neither drain, stop, boot nor warm-up: a slow machine is slow in all of it.
MAX_OVERHEAD_SHARE = 0.1
TIMES = ("out_of_rotation_s", "drain_s", "stop_s", "boot_s", "warm_s", "overhead_s")
HEARTBEAT_S = 15


class DemoError(Exception):
    """Says what went wrong, and where to read on."""


class Clock:
    def __init__(self) -> None:
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


class Demo:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.clock = Clock()
        self.inventory = ""
        self.router = ""

    @contextlib.contextmanager
    def started(self, command: list[str], **options: t.Any) -> t.Iterator[subprocess.Popen[bytes]]:
        """A process that does not outlive the block."""
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment, **options)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            if process.poll() is None:
                process.kill()
                process.wait()

    def output(self, *command: str) -> str:
        """What a command of the lab's prints; its progress is seen as it comes."""
        with self.started(list(command), stdout=subprocess.PIPE) as process:
            printed, _none = process.communicate()
        if process.returncode:
            raise DemoError(f"`{' '.join(command)}` failed (exit {process.returncode}); what it said is above")
        return printed.decode().strip()

    def lab(self, verb: str, *arguments: str) -> str:
        return self.output(str(LAB), verb, "--name", self.options.name, *arguments)

    def playbook(self, name: str, path: str, *arguments: str) -> float:
        """Runs a playbook to its end, with a word now and then on where it is; returns the seconds that it took."""
        log = LOGS / f"{name}.log"
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", self.inventory]
        command += ["-i", str(ROOT / "tests/lab/inventory"), path, *arguments]
        began = told = time.monotonic()
        with log.open("wb") as output, self.started(command, stdout=output, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - told > HEARTBEAT_S:
                    told = time.monotonic()
                    tasks = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("TASK ")]
                    self.clock.say(f"  {name}: {tasks[-1].strip(' *') if tasks else 'begins'}")
        took = time.monotonic() - began
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise DemoError(f"{path} failed (exit {process.returncode}); the end of {log}:\n{tail}")
        self.clock.say(f"{name}: {took:.1f} s")
        return took

    def prepare(self) -> None:
        self.output(str(LAB), "wheels")
        layer = self.output(sys.executable, "tests/lab/bake.py")
        self.clock.say(f"layer {layer} is there")
        self.down()
        self.lab("up", "--subnet", self.options.subnet, "--hosts", str(HOSTS), "--routers", "1", "--layer", layer)
        self.inventory = self.lab("inventory", "--path")
        groups = json.loads(Path(self.inventory).read_text())["all"]["children"]
        self.router = groups["vllm_routers"]["hosts"]["r1"]["ansible_host"]
        self.clock.say(f"{HOSTS} engine hosts and a router are up")

    def down(self) -> None:
        self.lab("down")

    def engine_version(self) -> str:
        ask = "import importlib.metadata as m; print(m.version('vllm'))"
        return f"vllm {self.lab('ssh', 'e1', '/opt/vllm/engines/chat/bin/python', '-c', ask)}"

    def under_load(self, name: str, change: t.Callable[[], float]) -> dict[str, t.Any]:
        """Makes a change while the streams run; returns the load's report, and in it the time that the change took."""
        stop, running = LOGS / f"{name}-load.stop", LOGS / f"{name}-load.running"
        out = BUILD / f"load-{name}.json"
        for path in (stop, running, out):
            path.unlink(missing_ok=True)
        command = [sys.executable, "tests/load/load.py", "--url", f"http://{self.router}:8000", "--model", MODEL]
        command += ["--streams", str(STREAMS), "--mix", MIX, "--out", str(out)]
        command += ["--until-file", str(stop), "--running-file", str(running)]
        log = LOGS / f"{name}-load.log"
        with log.open("wb") as output, self.started(command, stdout=output, stderr=subprocess.STDOUT) as load:
            deadline = time.monotonic() + 60
            while not running.exists():
                if load.poll() is not None or time.monotonic() > deadline:
                    raise DemoError(f"not every stream had a token within 60 s; see {log}")
                time.sleep(0.1)
            self.clock.say(f"{name}: {STREAMS} streams run")
            time.sleep(3)
            wall = change()
            time.sleep(3)
            stop.touch()
            load.wait(180)
        if not out.exists():
            raise DemoError(f"the load of {name} ended without a report; see {log}")
        return {**json.loads(out.read_text()), "change_s": round(wall, 1)}

    def measure(self) -> tuple[str, list[dict[str, t.Any]], dict[str, t.Any], dict[str, t.Any]]:
        """The engine's version, the hosts' times, and the load reports of our roll and of the naive one."""
        self.playbook("site", "playbooks/site.yml")
        version = self.engine_version()
        roll = LOGS / "roll.json"
        roll.unlink(missing_ok=True)
        ours = self.under_load(
            "ours",
            lambda: self.playbook("rolling_restart", "playbooks/rolling_restart.yml", "-e", f"vllm_report_path={roll}"),
        )
        self.playbook("naive_prepare", "benchmarks/naive_restart.yml", "--tags", "prepare")
        naive = self.under_load(
            "naive", lambda: self.playbook("naive_restart", "benchmarks/naive_restart.yml", "--tags", "restart")
        )
        return version, json.loads(roll.read_text())["hosts"], ours, naive


def summary(load: dict[str, t.Any]) -> dict[str, t.Any]:
    counts = load["counts"]
    return {**{key: counts[key] for key in ("requests", "lost", "cut")}, "wall_s": load["change_s"]}


def table(hosts: list[dict[str, t.Any]], **loads: dict[str, t.Any]) -> str:
    lines = [f"{'':10}{'requests':>10}{'lost':>7}{'cut':>7}{'wall':>10}{'in flight':>11}{'longest gap':>13}"]
    for name, load in loads.items():
        row = summary(load)
        gap = load["longest_gap_s"]["max"]
        lines.append(
            f"{name:10}{row['requests']:>10}{row['lost']:>7}{row['cut']:>7}{row['wall_s']:>8.1f} s"
            f"{'>= ' + str(load['concurrency']['min']):>11}{'-' if gap is None else f'{gap:.1f} s':>13}"
        )
    lines += ["", f"{'host':10}" + "".join(f"{step.removesuffix('_s').replace('_', ' '):>17}" for step in TIMES)]
    lines += [f"{host['name']:10}" + "".join(f"{host[step]:>15.1f} s" for step in TIMES) for host in hosts]
    return "\n".join(lines)


def failures(hosts: list[dict[str, t.Any]], ours: dict[str, t.Any], naive: dict[str, t.Any]) -> list[str]:
    """What was to be shown and was not."""
    counts, least = ours["counts"], ours["concurrency"]["min"]
    found = []
    if counts["lost"] or counts["cut"]:
        found.append(f"our roll lost {counts['lost']} and cut {counts['cut']} requests: {ours['reasons']}")
    if counts["requests"] < MIN_REQUESTS:
        found.append(f"our roll saw {counts['requests']} requests, fewer than {MIN_REQUESTS}")
    if least < STREAMS:
        found.append(f"at a time only {least} of {STREAMS} streams were in flight")
    renewed = [host["name"] for host in hosts if host["changed"]]
    if len(renewed) != HOSTS:
        found.append(f"of {HOSTS} hosts our roll restarted {', '.join(renewed) or 'none'}")
    found += [
        f"{host['name']} was out of rotation for {host['overhead_s']} s beyond drain, stop, boot and warm-up, more "
        f"than {MAX_OVERHEAD_SHARE:.0%} of {host['out_of_rotation_s']} s"
        for host in hosts
        if host["overhead_s"] > MAX_OVERHEAD_SHARE * host["out_of_rotation_s"]
    ]
    if naive["counts"]["lost"] + naive["counts"]["cut"] == 0:
        found.append("the naive roll lost and cut nothing, so this load proves nothing")
    return found


def stop(*_signal: object) -> t.NoReturn:
    """Once: what ends the lab is not to be interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit("demo: stopped by a signal")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="demo", help="name of the lab (default: demo)")
    parser.add_argument("--subnet", default="10.75.0.0/24", help="its network (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the lab running")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("demo: needs root, for namespaces, mounts and a bridge; run: sudo make demo")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    LOGS.mkdir(parents=True, exist_ok=True)
    demo = Demo(options)
    with files.locked(files.cache() / "locks" / f"demo-{options.name}", wait=False) as alone:
        if not alone:
            sys.exit(f"demo: lab {options.name} is another demo's, which still runs; wait, or give --name and --subnet")
        try:
            demo.prepare()
            version, hosts, ours, naive = demo.measure()
        except DemoError as error:
            sys.exit(f"demo: {error}")
        finally:
            if not options.keep:
                demo.down()
    report = {
        "schema": "baremetal.vllm/roll-report",
        "version": 1,
        "ours": {**summary(ours), "hosts": [{key: host[key] for key in ("name", *TIMES)} for host in hosts]},
        "naive": summary(naive),
        "engine": version,
    }
    (BUILD / "roll-report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{table(hosts, ours=ours, naive=naive)}\n", flush=True)
    wrong = failures(hosts, ours, naive)
    for line in wrong:
        print(f"demo: {line}", file=sys.stderr)
    demo.clock.say(f"{'FAILED' if wrong else 'passed'}; build/roll-report.json, logs in build/demo")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
