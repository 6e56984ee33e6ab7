# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rolls a fleet of three engines with real vLLM under streaming clients, first by our playbook, then by a naive one.

Makes what it needs (wheels, base tree, a layer with the runtime) and a lab of three engine hosts and a router, which it
takes down at the end. Writes build/roll-report.json, prints a table, and fails when one of its claims does not hold.
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
HOSTS = 3
MODEL = "tiny"
MIX = "short=8-40:5,long=200-400:1"
MIN_REQUESTS = 200
MAX_OVERHEAD_S = 3.0
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

    def run(self, name: str, command: list[str], *, tasks: bool = False) -> str:
        """Runs a command to its end; its output goes to a log, and to the message if it fails."""
        log = LOGS / f"{name}.log"
        began = time.monotonic()
        with log.open("wb") as output, self.started(command, stdout=output, stderr=subprocess.STDOUT) as process:
            told = began
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - told > HEARTBEAT_S:
                    told = time.monotonic()
                    lines = log.read_text(errors="replace").splitlines()
                    shown = [line for line in lines if line.startswith("TASK ")] if tasks else lines
                    self.clock.say(f"  {name}: {(shown or ['…'])[-1].rstrip(' *')}")
        text = log.read_text(errors="replace")
        if process.returncode:
            tail = "\n".join(text.splitlines()[-40:])
            raise DemoError(f"{name} failed (exit {process.returncode}); the end of {log}:\n{tail}")
        self.clock.say(f"{name}: {time.monotonic() - began:.1f} s")
        return text

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
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise DemoError(f"`{' '.join(command)}` failed (exit {done.returncode}); what it said is above")
        return done.stdout.strip()

    def lab(self, verb: str, *arguments: str) -> str:
        return self.output(str(LAB), verb, "--name", self.options.name, *arguments)

    def playbook(self, name: str, path: str, *arguments: str) -> float:
        began = time.monotonic()
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", self.inventory]
        self.run(name, [*command, "-i", str(ROOT / "tests/lab/inventory"), path, *arguments], tasks=True)
        return time.monotonic() - began

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

    def under_load(self, name: str, change: t.Callable[[], float]) -> tuple[dict[str, t.Any], float]:
        """Makes a change while the streams run; returns the load's report and the time that the change took."""
        stop, running, out = (LOGS / f"{name}-load.{suffix}" for suffix in ("stop", "running", "json"))
        for path in (stop, running, out):
            path.unlink(missing_ok=True)
        command = [sys.executable, "tests/load/load.py", "--url", f"http://{self.router}:8000", "--model", MODEL,
                   "--streams", str(self.options.streams), "--mix", MIX, "--until-file", str(stop),
                   "--running-file", str(running), "--out", str(out)]  # fmt: skip
        log = LOGS / f"{name}-load.log"
        with log.open("wb") as output, self.started(command, stdout=output, stderr=subprocess.STDOUT) as load:
            deadline = time.monotonic() + 60
            while not running.exists():
                if load.poll() is not None or time.monotonic() > deadline:
                    raise DemoError(f"not every stream had a token within 60 s; see {log}")
                time.sleep(0.1)
            self.clock.say(f"{name}: {self.options.streams} streams run")
            time.sleep(3)
            wall = change()
            time.sleep(3)
            stop.touch()
            load.wait(180)
        if not out.exists():
            raise DemoError(f"the load of {name} ended without a report; see {log}")
        return json.loads(out.read_text()), wall

    def measure(self) -> dict[str, t.Any]:
        self.playbook("site", "playbooks/site.yml")
        engine = self.engine_version()
        roll = LOGS / "roll.json"
        roll.unlink(missing_ok=True)

        def ours_change() -> float:
            return self.playbook("rolling_restart", "playbooks/rolling_restart.yml", "-e", f"vllm_report_path={roll}")

        def naive_change() -> float:
            return self.playbook("naive_restart", "benchmarks/naive_restart.yml", "--tags", "restart")

        load, wall = self.under_load("ours", ours_change)
        hosts = json.loads(roll.read_text())["hosts"]
        ours = {**summary(load, wall), "hosts": hosts}
        if self.options.ours_only:
            return {"ours": ours, "naive": None, "engine": engine}
        self.playbook("naive_prepare", "benchmarks/naive_restart.yml", "--tags", "prepare")
        load, wall = self.under_load("naive", naive_change)
        return {"ours": ours, "naive": summary(load, wall), "engine": engine}


def summary(load: dict[str, t.Any], wall: float) -> dict[str, t.Any]:
    counts = load["counts"]
    return {
        "requests": counts["requests"],
        "lost": counts["lost"],
        "cut": counts["cut"],
        "wall_s": round(wall, 1),
        "streams": load["streams"],
        "least_in_flight": load["concurrency"]["min"],
        "tokens_per_s": load["tokens_per_s"],
        "longest_gap_s": load["longest_gap_s"]["max"],
        "reasons": load["reasons"],
    }


def table(report: dict[str, t.Any]) -> str:
    lines = [f"{'':10}{'requests':>10}{'lost':>7}{'cut':>7}{'wall':>10}{'in flight':>11}{'longest gap':>13}"]
    for name in ("ours", "naive"):
        row = report[name]
        if row:
            gap = "-" if row["longest_gap_s"] is None else f"{row['longest_gap_s']:.1f} s"
            wall = f"{row['wall_s']:.1f} s"
            flight = f">= {row['least_in_flight']}"
            lines.append(
                f"{name:10}{row['requests']:>10}{row['lost']:>7}{row['cut']:>7}{wall:>10}{flight:>11}{gap:>13}"
            )
    steps = ("out_of_rotation_s", "drain_s", "stop_s", "boot_s", "warm_s", "overhead_s")
    lines += ["", f"{'host':10}" + "".join(f"{step.removesuffix('_s').replace('_', ' '):>17}" for step in steps)]
    for host in report["ours"]["hosts"]:
        lines.append(f"{host['name']:10}" + "".join(f"{host[step]:>15.1f} s" for step in steps))
    return "\n".join(lines)


def failures(report: dict[str, t.Any], streams: int) -> list[str]:
    """What the report does not show although it should."""
    ours, naive = report["ours"], report["naive"]
    found = []
    if ours["lost"] or ours["cut"]:
        found.append(f"our roll lost {ours['lost']} and cut {ours['cut']} requests: {ours['reasons']}")
    if ours["requests"] < MIN_REQUESTS:
        found.append(f"our roll saw {ours['requests']} requests, fewer than {MIN_REQUESTS}")
    if ours["least_in_flight"] < streams:
        found.append(f"at a time only {ours['least_in_flight']} of {streams} streams were in flight")
    renewed = [host["name"] for host in ours["hosts"] if host["changed"]]
    if len(renewed) != HOSTS:
        found.append(f"of {HOSTS} hosts our roll restarted {', '.join(renewed) or 'none'}")
    found += [
        f"{host['name']} was out of rotation {host['overhead_s']} s beyond drain, stop, boot and warm-up"
        for host in ours["hosts"]
        if host["overhead_s"] > MAX_OVERHEAD_S
    ]
    if naive and naive["lost"] + naive["cut"] == 0:
        found.append("the naive roll lost and cut nothing, so this load proves nothing")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="demo", help="name of the lab (default: demo)")
    parser.add_argument("--subnet", default="10.75.0.0/24", help="its network (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="requests in flight (default: 8)")
    parser.add_argument("--keep", action="store_true", help="leave the lab running")
    parser.add_argument("--ours-only", action="store_true", help="leave the naive roll out")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("demo: needs root, for namespaces, mounts and a bridge; run: sudo make demo")
    signal.signal(signal.SIGTERM, lambda *_unused: sys.exit("demo: terminated"))
    LOGS.mkdir(parents=True, exist_ok=True)
    demo = Demo(options)
    try:
        demo.prepare()
        report = demo.measure()
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    finally:
        if not options.keep:
            demo.down()
    report = {"schema": "baremetal.vllm/roll-report", "version": 1, **report}
    (BUILD / "roll-report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{table(report)}\n")
    wrong = failures(report, options.streams)
    for line in wrong:
        print(f"demo: {line}", file=sys.stderr)
    demo.clock.say(f"{'FAILED' if wrong else 'passed'}; build/roll-report.json, logs in build/demo")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
