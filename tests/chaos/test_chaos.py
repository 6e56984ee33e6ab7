# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each fault at each step of a roll, on real vLLM under load: what clients lost, what the run said, what is left.

In the middle of every case a run ends one way or another. Then the same command is given once more, and everything has
to serve. A fault that cuts connections itself, such as the death of an engine, may cost the requests that it had; no
other may cost any. CHAOS=all runs all cases, else those that a day of work can afford.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import typing as t
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.rolling.fleet import CHECKOUT

LOAD = CHECKOUT / "tests/load/load.py"
HOST, ROUTER = "e1", "r1"
UNIT = "vllm-engine@chat.service"
ROLL = {"vllm_roll_connect_timeout": 10, "vllm_roll_drain_timeout": 60, "vllm_roll_restart_timeout": 600}
STEPS = ("draining", "stopping", "starting")
# Every process that starts on the host after `clock_ready` has its clock that many seconds ahead, read at each look.
AHEAD = "/etc/clock-ahead"
CLOCK = "/usr/local/lib/clock.so"
BOUNDED = [("play killed", "starting"), ("engine hangs", "draining"), ("engine killed", "starting"),
           ("network cut", "draining"), ("disk full", "draining")]  # fmt: skip


@dataclass
class Case:
    """One fault in one roll of one host."""

    fleet: object
    roll: subprocess.Popen | None = None
    others: list[subprocess.Popen] = field(default_factory=list)

    def ssh(self, command: str) -> str:
        return self.fleet.ssh(HOST, command, check=False)

    def signal_engine(self, name: str) -> None:
        """Its main process, which a start has only after the checks before it."""
        self.fleet.wait("the engine has a process", lambda: self.fleet.main_pid(HOST) > 0, 60)
        assert self.ssh(f"kill -{name} {self.fleet.main_pid(HOST)} && echo done").strip() == "done"

    def kill_core(self) -> None:
        """The process that has the model; its parent, which answers requests, lives on."""
        core = f"pgrep --full --oldest --parent $(systemctl show --value --property MainPID {UNIT}) EngineCore"
        self.fleet.wait("the engine has a core", lambda: self.ssh(core).strip(), 120)
        assert self.ssh(f"kill -KILL $({core}) && echo done").strip() == "done"

    def router(self, verb: str) -> None:
        assert self.fleet.ssh(ROUTER, f"systemctl {verb} vllm-router.service && echo done").strip() == "done"

    def clock_ready(self) -> None:
        built = CHECKOUT / "build/clock.so"
        source = Path(__file__).with_name("clock.c")
        words = ["gcc", "-shared", "-fPIC", "-O2", f'-DAHEAD="{AHEAD}"', "-o", str(built), str(source)]
        subprocess.run(words, check=True)
        self.fleet.ssh(
            HOST,
            f"echo {base64.b64encode(built.read_bytes()).decode()} | base64 --decode > {CLOCK} && echo 0 > {AHEAD}"
            f" && cp /etc/environment /root/environment && echo LD_PRELOAD={CLOCK} >> /etc/environment"
            f" && systemctl set-environment LD_PRELOAD={CLOCK}",
        )

    def clock_jumps(self, seconds: int) -> None:
        self.ssh(f"echo {seconds} > {AHEAD}")
        ahead = int(self.ssh("date +%s")) - time.time()
        assert abs(ahead - seconds) < 60, "what starts on the host reads another time"

    def clock_back_to_true(self) -> None:
        self.ssh(f"mv /root/environment /etc/environment; systemctl unset-environment LD_PRELOAD; echo 0 > {AHEAD}")

    def kill_play(self) -> None:
        self.roll.send_signal(signal.SIGKILL)
        self.roll.wait()

    def output(self) -> str:
        """What the run printed to its end; its connections outlive one that was killed, and keep the pipe."""
        if self.roll.returncode == -signal.SIGKILL:
            self.roll.stdout.close()
            return ""
        for other in self.others:
            other.communicate(timeout=900)
        return self.roll.communicate(timeout=900)[0]

    def end(self) -> None:
        """A case that has failed leaves no run behind; the next one goes on with what it began."""
        for run in (self.roll, *self.others):
            if run and run.poll() is None:
                run.kill()
                run.wait()

    def second_roll(self) -> None:
        self.others.append(self.fleet.begin("rolling_restart.yml", f"--limit={HOST}", **ROLL))

    def fill_disk(self) -> None:
        """Where the records of the engine are kept, which is a small disk of its own from now on."""
        self.ssh(
            "cp -a /var/lib/vllm/chat /root/state && mount -t tmpfs -o size=64k,mode=0755 none /var/lib/vllm/chat"
            " && cp -a /root/state/. /var/lib/vllm/chat/; rm -rf /root/state;"
            " dd if=/dev/zero of=/var/lib/vllm/chat/full bs=1k count=100"
        )

    def empty_disk(self) -> None:
        self.ssh(
            "rm -f /var/lib/vllm/chat/full; cp -a /var/lib/vllm/chat /root/state; umount /var/lib/vllm/chat"
            " && cp -a /root/state/. /var/lib/vllm/chat/; rm -rf /root/state"
        )

    def cut(self) -> None:
        self.fleet.lab("cut", HOST)
        time.sleep(15)
        self.fleet.lab("mend", HOST)

    def lose_power(self) -> None:
        self.fleet.kill(HOST)
        time.sleep(3)
        self.fleet.boot(HOST)
        self.fleet.wait(f"{HOST} answers", lambda: self.ssh("echo up").strip() == "up", 60)

    def reboot(self) -> None:
        boot = "cat /proc/sys/kernel/random/boot_id"
        before = self.ssh(boot)
        self.ssh("nohup systemctl reboot > /dev/null 2>&1 &")
        self.fleet.wait(f"{HOST} has booted", lambda: self.ssh(boot) not in ("", before), 240)


@dataclass(frozen=True)
class Fault:
    """``cuts``: it ends connections by itself. ``readies`` comes before the run, ``heals`` once it has ended."""

    does: str
    cuts: bool = False
    arguments: tuple = ()
    readies: str = ""
    heals: str = ""
    steps: tuple = STEPS


FAULTS = {
    "play killed": Fault("kill_play"),
    "second roll": Fault("second_roll"),
    "daemon-reload": Fault("ssh", arguments=("systemctl daemon-reload",)),
    "gate reloaded": Fault("ssh", arguments=("systemctl reload vllm-gate.service",)),
    "gate restarted": Fault("ssh", cuts=True, arguments=("systemctl restart vllm-gate.service",)),
    "engine hangs": Fault("signal_engine", cuts=True, arguments=("STOP",)),
    "engine killed": Fault("signal_engine", cuts=True, arguments=("KILL",)),
    "core killed": Fault("kill_core", cuts=True, steps=("draining", "starting")),  # a stop begins by ending it
    "router reloaded": Fault("router", arguments=("reload",)),
    "router restarted": Fault("router", cuts=True, arguments=("restart",)),
    "clock forward": Fault("clock_jumps", arguments=(5 * 3600,), readies="clock_ready", heals="clock_back_to_true"),
    "clock back": Fault("clock_jumps", arguments=(-5 * 3600,), readies="clock_ready", heals="clock_back_to_true"),
    "disk full": Fault("fill_disk", heals="empty_disk"),
    "network cut": Fault("cut", cuts=True),
    "power lost": Fault("lose_power", cuts=True),
    "host rebooted": Fault("reboot"),
}
CASES = [(name, step) for name, fault in FAULTS.items() for step in fault.steps]
assert set(BOUNDED) <= set(CASES)


def reached(fleet, step: str) -> bool:
    if step == "draining":
        return fleet.ready(HOST) == 503 and fleet.active(HOST) == "active"
    return fleet.active(HOST) == {"stopping": "deactivating", "starting": "activating"}[step]


def start_of(fleet) -> str:
    """Systemd's id of the start that is current: a process has the same number again after a reboot."""
    return fleet.ssh(HOST, f"systemctl show --value --property InvocationID {UNIT}").strip()


def said(output: str, status: int | None) -> str:
    """The run's own first words on what went wrong."""
    if status == 0:
        return "done"
    text = " ".join(output.replace("\\n", " ").split())
    for mark in (" failed: ", '"msg": ', "msg: ", "UNREACHABLE"):
        if mark in text:
            return text.partition(mark)[2][:100]
    return f"nothing (exit {status})"


def cases() -> list[t.Any]:
    """The first two of the bounded ones are part of make test, too."""
    chosen = CASES if os.environ.get("CHAOS") == "all" else BOUNDED
    return [pytest.param(*case, marks=() if case in BOUNDED[:2] else pytest.mark.long) for case in chosen]


@pytest.mark.parametrize(("name", "step"), cases())
def test_a_fault_in_a_roll(fleet, add_row, tmp_path, name, step):
    fault = FAULTS[name]
    case = Case(fleet)
    if [fleet.ready(host) for host in fleet.engines] != [200] * 3:  # the case before this one has failed midway
        fleet.play("rolling_restart.yml", f"--limit={HOST}", rc=None, **ROLL)
    assert [fleet.ready(host) for host in fleet.engines] == [200] * 3, "all serve before"
    before = start_of(fleet)
    began = time.monotonic()
    stop, running, report = tmp_path / "stop", tmp_path / "running", tmp_path / "load.json"
    command = [sys.executable, str(LOAD), "--url", fleet.router, "--model", "tiny", "--streams", "4"]
    command += ["--mix", "short=8-40:3,long=200-400:1", "--out", str(report), "--timeout", "240", "--progress", "600"]
    load = subprocess.Popen([*command, "--until-file", str(stop), "--running-file", str(running)])
    try:
        fleet.wait("every client has had a token", running.exists, 60)
        if fault.readies:
            getattr(case, fault.readies)()
        case.roll = fleet.begin("rolling_restart.yml", f"--limit={HOST}", **ROLL)
        while not reached(fleet, step):
            assert case.roll.poll() is None, f"the roll ended before it was seen {step}: {case.roll.communicate()[0]}"
        getattr(case, fault.does)(*fault.arguments)
        output = case.output()
        if fault.heals:
            getattr(case, fault.heals)()
        again = fleet.play("rolling_restart.yml", f"--limit={HOST}", rc=None, **ROLL)
        time.sleep(2)
    finally:
        case.end()
        if fault.heals:  # once more, for a case that has failed before
            getattr(case, fault.heals)()
        stop.touch()
        load.wait(300)
    seen = json.loads(report.read_text())
    states = [(fleet.ready(host), fleet.active(host), fleet.lease(host)) for host in fleet.engines]
    well = states == [(200, "active", None)] * 3 and start_of(fleet) != before
    counts = seen["counts"]
    add_row(
        {
            "fault": name,
            "step": step,
            **counts,
            "said": said(output, case.roll.returncode),
            "after": "all serve" if well else f"not all serve: {[state[:2] for state in states]}",
            "seconds": round(time.monotonic() - began),
        }
    )
    assert well, f"{states}\n{output[-3000:]}\n{again[-3000:]}"
    assert counts["ok"] > 20
    if not fault.cuts:
        assert (counts["lost"], counts["cut"]) == (0, 0), seen["failures"]
