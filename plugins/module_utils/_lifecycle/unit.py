# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Speaks to systemd about one unit: systemctl, the unit's control group, its journal."""

from __future__ import annotations

import re
import socket
import time
import typing as t
from dataclasses import dataclass, field
from pathlib import Path

from . import boot, process, store
from .deadline import Deadline
from .errors import DeadlineExceeded, LifecycleError, Surprise, UsageError

_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "NRestarts",
    "MainPID",
    "ControlGroup",
    "ExecMainStartTimestampMonotonic",
    "NeedDaemonReload",
    "UnitFileState",
    "Job",
    "InvocationID",
    "ExecMainStatus",
    "LimitMEMLOCK",
)
# Where the hierarchy with systemd's groups is mounted: cgroup v2, hybrid, v1.
_HIERARCHIES = ("sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/systemd")
# A line of journalctl --output short-monotonic: [12345.678901] host vllm[812]: what was said
_STAMPED = re.compile(r"\[ *(?P<at>\d+\.\d+)\] \S+ [^:]+: (?P<line>.*)")
# INFO:      - "GET /health HTTP/1.1" 200 OK
_ASKED = re.compile(r'INFO: +\S* *- "GET [^"]*" \d+')
_DOOR = "vllm-lifecycle: "
QUERY_TIMEOUT = 20
# How often a start under way is told of.
TELL_EVERY = 5.0
# What a unit that starts is in the middle of while its log says nothing of it, by systemd's word.
_BEFORE_ITS_LOG = {
    "start-pre": "checks what it needs",
    "start-post": "imports its libraries",
    "dead": "waits for systemd",
}
MIB = 1024 * 1024


@dataclass(frozen=True)
class UnitState:
    """systemd's view of a unit. Times are seconds on the monotonic clock; a limit of None is none."""

    load_state: str
    active_state: str
    sub_state: str
    result: str
    n_restarts: int
    main_pid: int
    control_group: str
    started_at: float
    need_daemon_reload: bool
    enabled: str
    job: str
    invocation: str = ""
    locked_limit_mib: int | None = None
    main_status: int = 0
    pids: list[int] = field(default_factory=list)


def _systemctl(*arguments: str) -> process.Done[str]:
    try:
        return process.run(["systemctl", *arguments], QUERY_TIMEOUT)
    except FileNotFoundError as exc:
        raise UsageError(
            f"host {socket.gethostname()} has no systemctl, so no systemd runs its units",
            entry="systemd-missing",
            next_step="use a host that was booted with systemd",
        ) from exc
    except process.TimeoutExpired as exc:
        raise LifecycleError(
            f"systemctl {' '.join(arguments)} gave no answer within {QUERY_TIMEOUT} s",
            entry="systemd-no-answer",
            next_step=f"look at the system manager of {socket.gethostname()}: systemctl list-jobs",
        ) from exc


def _why(journal: t.Sequence[str]) -> str:
    """What the unit's own command has failed with, which names the entry of the cause."""
    said = [line for line in journal if line.startswith(_DOOR)]
    return f". Its start said: {said[-1].removeprefix(_DOOR)}" if said else ""


class Unit:
    """One systemd unit, by its full name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def show(self) -> UnitState:
        """What systemd knows now.

        :raises UsageError: systemd does not run here, or the unit does not exist.
        :raises Surprise: an answer that is none.
        """
        done = _systemctl("show", "--property", ",".join(_PROPERTIES), "--", self.name)
        if done.returncode != 0:
            raise UsageError(
                f"systemctl on host {socket.gethostname()} cannot show {self.name}: {done.stderr.strip()}",
                entry="systemd-no-answer",
                next_step="run as root on a host that was booted with systemd",
            )
        values = dict(line.partition("=")[::2] for line in done.stdout.splitlines() if "=" in line)
        try:
            state = UnitState(
                load_state=values["LoadState"],
                active_state=values["ActiveState"],
                sub_state=values["SubState"],
                result=values.get("Result", ""),
                n_restarts=int(values.get("NRestarts") or 0),
                main_pid=int(values.get("MainPID") or 0),
                control_group=values.get("ControlGroup", ""),
                started_at=int(values.get("ExecMainStartTimestampMonotonic") or 0) / 1e6,
                need_daemon_reload=values.get("NeedDaemonReload") == "yes",
                enabled=values.get("UnitFileState", ""),
                job=values.get("Job", ""),
                invocation=values.get("InvocationID", ""),
                locked_limit_mib=int(limit) // MIB if (limit := values.get("LimitMEMLOCK", "")).isdigit() else None,
                main_status=int(values.get("ExecMainStatus") or 0),
                pids=group_pids(values.get("ControlGroup", "")),
            )
        except (KeyError, ValueError) as exc:
            raise Surprise(
                f"systemctl show {self.name} gave no usable answer ({exc!r}): {done.stdout[:200]!r}",
                entry="systemd-no-answer",
            ) from exc
        if state.load_state != "loaded":
            raise UsageError(
                f"host {socket.gethostname()}: unit {self.name} is {state.load_state}",
                entry="unit-missing",
                next_step="run baremetal.vllm.site, which installs the unit",
            )
        return state

    def start(self, deadline: Deadline, report: t.Callable[[str], None] | None = None) -> UnitState:
        """Start and wait until systemd says active, which for an engine means proved ready.

        :raises LifecycleError: the start failed; carries the end of the journal.
        :raises DeadlineExceeded: still starting at the deadline.
        """
        self._queue("reset-failed")  # a start that was asked for does not count against the limit of automatic ones
        old = self.show()
        self._queue("start", "--no-block")
        # Which start is meant: the one under way, or else the next one, whether by our job or by systemd's own restart.
        ours = old.invocation if old.active_state == "activating" and old.sub_state != "auto-restart" else ""
        told = time.monotonic()
        while True:
            state = self.show()
            if state.active_state == "active" and not state.job:
                return state
            if not ours and state.invocation != old.invocation:
                ours = state.invocation
            ended = state.active_state in ("failed", "inactive")
            # That start is over when systemd waits to make another, or has made it.
            over = ended or state.sub_state == "auto-restart" or state.invocation != ours
            never_began = ended and not state.job
            if over if ours else never_began:
                journal = (self.journal(40, ours) if ours else []) or self.journal(40)
                raise LifecycleError(
                    f"unit {self.name} did not start: {state.active_state}/{state.sub_state}, result {state.result}"
                    f"{_why(journal)}",
                    entry="unit-not-started",
                    next_step=f"read journalctl -u {self.name}, correct the cause and run this again",
                    journal=journal,
                )
            if report and time.monotonic() - told >= TELL_EVERY:
                told = time.monotonic()
                report(f"starting, {self._phase(state)}, {deadline.says}")
            if not deadline.rest():
                raise DeadlineExceeded(
                    f"unit {self.name} is still {state.active_state}/{state.sub_state} after {deadline.seconds:g} s",
                    entry="start-timeout",
                    next_step=f"read journalctl -u {self.name}; raise timeout when the engine is only slow",
                    journal=self.journal(40),
                )

    def _phase(self, state: UnitState) -> str:
        """How far a start has come: by its log, else by what the unit is in the middle of."""
        lines = self.journal(40, state.invocation) if state.invocation else []
        said = boot.phase(lines, self.name.partition("@")[2].removesuffix(".service"))
        return said or _BEFORE_ITS_LOG.get(state.sub_state, state.sub_state)

    def stop(self, deadline: Deadline) -> UnitState:
        """Stop, also a unit in a restart loop, and wait until its control group is empty. Returns how it ended.

        :raises DeadlineExceeded: something is left at the deadline; names the processes.
        """
        self._queue("stop", "--no-block")
        while True:
            state = self.show()
            if state.active_state in ("inactive", "failed") and not state.job and not state.pids:
                if state.active_state == "failed":
                    self._queue("reset-failed")
                return state
            if not deadline.rest():
                raise DeadlineExceeded(
                    f"unit {self.name} is still {state.active_state}/{state.sub_state} after {deadline.seconds:g} s",
                    entry="stop-timeout",
                    next_step=f"read journalctl -u {self.name}; its processes are listed under left",
                    left={"pids": state.pids},
                    journal=self.journal(20),
                )

    def journal(self, lines: int, invocation: str = "") -> list[str]:
        """The unit's last journal lines, with ``invocation`` those that its own processes of that start wrote.

        Not those that say only that somebody asked: the gate does so each second, and nothing else would be left. What
        went wrong in reading them stands in their place.
        """
        words = ["journalctl", "--unit", self.name, "--lines", str(lines * 10), "--no-pager", "--output", "cat"]
        try:
            done = process.run([*words, f"_SYSTEMD_INVOCATION_ID={invocation}"] if invocation else words, QUERY_TIMEOUT)
        except (OSError, process.TimeoutExpired) as exc:
            return [f"(the journal could not be read: {exc})"]
        return [line for line in (done.stdout or done.stderr).splitlines() if not _ASKED.match(line)][-lines:]

    def log(self, invocation: str, until: float | None = None) -> list[str] | None:
        """All that the processes of one start have logged; None where nothing of it can be read.

        :param invocation: systemd's id of that start.
        :param until: seconds since the epoch; later lines are left out.
        """
        more = [f"--until=@{int(until) + 1}"] if until is not None else []
        return self._logged(invocation, "cat", *more)

    def timed_log(self, invocation: str) -> list[tuple[float, str]]:
        """As ``log``, each line with its time: seconds on the monotonic clock. Empty where nothing can be read."""
        found = [_STAMPED.match(line) for line in self._logged(invocation, "short-monotonic") or ()]
        return [(float(one["at"]), one["line"]) for one in found if one]

    def _logged(self, invocation: str, output: str, *more: str) -> list[str] | None:
        if not invocation:
            return None
        words = ["journalctl", "--unit", self.name, "--quiet", "--no-pager", "--output", output, *more]
        try:
            done = process.run([*words, f"_SYSTEMD_INVOCATION_ID={invocation}"], QUERY_TIMEOUT)
        except (OSError, process.TimeoutExpired):
            return None
        return done.stdout.splitlines() if done.returncode == 0 else None

    def restart_soon(self) -> None:
        """Ask for a restart and do not wait for it."""
        self._queue("reset-failed")
        self._queue("restart", "--no-block")

    def _queue(self, verb: str, *options: str) -> None:
        done = _systemctl(verb, *options, "--", self.name)
        # A unit that nothing refers to and that does not run is not loaded, and has no failure to forget.
        if done.returncode != 0 and not (verb == "reset-failed" and "not loaded" in done.stderr):
            raise LifecycleError(
                f"systemctl {verb} {self.name} on host {socket.gethostname()}: {done.stderr.strip()}",
                entry="systemd-no-answer",
                next_step=f"read systemctl status {self.name}",
                journal=self.journal(20),
            )


def group_pids(control_group: str) -> list[int]:
    """Every process in a control group and the groups below it; empty when the group is gone."""
    if not control_group:
        return []
    for hierarchy in _HIERARCHIES:
        top = store.root() / hierarchy / control_group.lstrip("/")
        if not top.is_dir():
            continue
        pids: set[int] = set()
        for procs in [top / "cgroup.procs", *top.glob("**/*/cgroup.procs")]:
            try:
                pids.update(int(pid) for pid in procs.read_text().split())
            except OSError:  # a group that ended between listing and reading
                continue
        return sorted(pids)
    return []


def process_start(pid: int) -> int | None:
    """The start time of a live process in clock ticks since boot: with the pid its identity. None: gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
