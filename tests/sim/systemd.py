"""As much of systemd as the collection speaks to, for tests where no systemd can run. The lab has the real one.

A unit is a JSON file in the directory $SIM_UNITS, NAME.json or the template's `name@.service.json`, with systemd's own
directives as keys: ExecCondition, ExecStartPre, ExecStart, ExecStartPost, ExecStop, ExecStopPost (a command line or a
list of them), Environment (an object), EnvironmentFile, KillMode, Restart, RestartSec, TimeoutStartSec,
TimeoutStopSec, SuccessExitStatus, StartLimitBurst, MemoryMax, UnitFileState, Description.

One supervisor process for each started unit runs the commands in systemd's order and is the reaper of all that they
leave behind, so its descendants are the unit's control group; they are listed in
$SIM_UNITS/cgroup/system.slice/NAME/cgroup.procs. What the commands print is in $SIM_UNITS/run/NAME/journal.
NAME.override.json replaces properties in `show`; its key "fail" lets every systemctl call for the unit fail.
"""

from __future__ import annotations

# systemctl is called for every look at a unit: what only a supervisor needs is imported where it is needed.
import contextlib
import json
import os
import signal
import sys
import time
import typing as t
from pathlib import Path

if t.TYPE_CHECKING:
    import subprocess

DEFAULTS: dict[str, t.Any] = {
    "Id": "",
    "Description": "",
    "LoadState": "loaded",
    "ActiveState": "inactive",
    "SubState": "dead",
    "Result": "success",
    "NRestarts": "0",
    "MainPID": "0",
    "ControlPID": "0",
    "ExecMainCode": "0",
    "ExecMainStatus": "0",
    "ExecMainStartTimestampMonotonic": "0",
    "ExecMainExitTimestampMonotonic": "0",
    "ActiveEnterTimestampMonotonic": "0",
    "ActiveExitTimestampMonotonic": "0",
    "InactiveEnterTimestampMonotonic": "0",
    "StateChangeTimestampMonotonic": "0",
    "ControlGroup": "",
    "UnitFileState": "enabled",
    "FragmentPath": "",
    "DropInPaths": "",
    "NeedDaemonReload": "no",
    "InvocationID": "",
    "Job": "",
    "Type": "exec",
    "KillMode": "control-group",
    "Restart": "no",
    "MemoryMax": "infinity",
    "MemoryLimit": "infinity",
    "MemoryCurrent": "[not set]",
    "TimeoutStartUSec": "infinity",
    "TimeoutStopUSec": "1min 30s",
}
STEP = 0.02
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def now() -> str:
    return str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)


class Unit:
    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name if "." in name else f"{name}.service"
        self.run = root / "run" / self.name
        prefix, _unused, rest = self.name.partition("@")
        self.instance = rest.rpartition(".")[0]
        template = root / f"{prefix}@.service.json"
        own = root / f"{self.name}.json"
        self.file = own if own.exists() or not self.instance else template
        self.cgroup = root / "cgroup" / "system.slice" / self.name

    def exists(self) -> bool:
        return self.file.exists()

    def journal(self, invocation: str = "") -> bytes:
        """What was printed, in all or since that start; each start begins where the journal then ended."""
        path = self.run / "journal"
        text = path.read_bytes() if path.exists() else b""
        starts = self.run / "invocations"
        if not invocation or not starts.exists():
            return text
        begins = [line.split() for line in starts.read_text().splitlines()]
        for number, (name, begin) in enumerate(begins):
            if name == invocation:
                end = int(begins[number + 1][1]) if number + 1 < len(begins) else len(text)
                return text[int(begin) : end]
        return b""

    def load(self) -> dict[str, t.Any]:
        description: dict[str, t.Any] = json.loads(self.file.read_text())
        return description

    def override(self) -> dict[str, t.Any]:
        path = self.root / f"{self.name}.override.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def written(self) -> dict[str, str]:
        """The properties as the last update left them; bin/systemctl prints them without starting Python."""
        path = self.run / "state"
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(line.partition("=")[::2] for line in lines)

    def state(self) -> dict[str, str]:
        found = {**DEFAULTS, "Id": self.name, **self.written()}
        if not self.exists():
            return {**found, "LoadState": "not-found", "UnitFileState": ""}
        loaded = self.load()
        for key in ("Description", "KillMode", "Restart", "MemoryMax", "UnitFileState"):
            found[key] = str(loaded.get(key, DEFAULTS[key]))
        found["LoadState"] = "loaded"
        found["FragmentPath"] = str(self.file)
        if (self.run / "enabled").exists():
            found["UnitFileState"] = (self.run / "enabled").read_text()
        return found

    def update(self, **changed: t.Any) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        found = self.state()
        if "ActiveState" in changed and changed["ActiveState"] != found["ActiveState"]:
            changed["StateChangeTimestampMonotonic"] = now()
            stamp = {"active": "ActiveEnter", "inactive": "InactiveEnter", "failed": "InactiveEnter"}
            if name := stamp.get(changed["ActiveState"]):
                changed[f"{name}TimestampMonotonic"] = now()
        found.update({key: str(value) for key, value in changed.items()})
        part = self.run / "state.new"
        part.write_text("".join(f"{key}={value}\n" for key, value in found.items()))
        part.replace(self.run / "state")

    def group(self, pids: list[int]) -> None:
        """Write the control group down."""
        self.cgroup.mkdir(parents=True, exist_ok=True)
        part = self.cgroup / "cgroup.procs.new"
        part.write_text("".join(f"{pid}\n" for pid in sorted(pids)))
        part.replace(self.cgroup / "cgroup.procs")

    def supervisor(self) -> int:
        """Its pid; 0 when none runs."""
        try:
            pid = int((self.run / "supervisor").read_text())
            os.kill(pid, 0)
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (OSError, ValueError):
            return 0
        return 0 if stat.rpartition(")")[2].split()[0] == "Z" else pid


class Stopped(Exception):
    """Somebody has asked for a stop."""


class Supervisor:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.text = unit.load()
        self.main: subprocess.Popen[bytes] | None = None
        self.stop_wanted = False
        self.restarts = 0
        self.starts = 0
        self.result = "success"

    def words(self, line: str | list[str]) -> list[str]:
        import shlex

        words = shlex.split(line) if isinstance(line, str) else list(line)
        pid = self.living_main().get("MAINPID", "")
        marks = {"%i": self.unit.instance, "%n": self.unit.name, "${MAINPID}": pid, "$MAINPID": pid}
        for mark, value in marks.items():
            words = [word.replace(mark, value) for word in words]
        return words

    def living_main(self) -> dict[str, str]:
        return {"MAINPID": str(self.main.pid)} if self.main and self.main.poll() is None else {}

    def environment(self, **more: str) -> dict[str, str]:
        given: dict[str, str] = dict(self.text.get("Environment", {}))
        if file := self.text.get("EnvironmentFile"):
            for line in Path(file.replace("%i", self.unit.instance)).read_text().splitlines():
                name, equals, value = line.partition("=")
                if equals and not line.startswith("#"):
                    given[name] = value.strip("\"'")
        invocation = self.unit.state()["InvocationID"]
        return {**os.environ, **given, **self.living_main(), "INVOCATION_ID": invocation, **more}

    def launch(self, line: str | list[str], **more: str) -> subprocess.Popen[bytes]:
        import subprocess

        words = self.words(line)
        words[0] = words[0].lstrip("+-@!:")
        with open(self.unit.run / "journal", "ab") as journal:
            return subprocess.Popen(
                words, env=self.environment(**more), stdin=subprocess.DEVNULL, stdout=journal, stderr=journal
            )

    # waiting

    def tick(self) -> None:
        time.sleep(STEP)
        self.members()

    def members(self) -> list[int]:
        """The control group: every descendant, zombies aside, but for units that one of them had started."""
        found, queue = [], [os.getpid()]
        others = self.other_supervisors()
        while queue:
            pid = queue.pop()
            if pid in others:
                continue
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    queue += [int(child) for child in (task / "children").read_text().split()]
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if pid != os.getpid() and stat[0] != "Z":
                    found.append(pid)
        self.unit.group(found)
        return found

    def other_supervisors(self) -> set[int]:
        pids = set()
        for file in self.unit.root.glob("run/*/supervisor"):
            with contextlib.suppress(OSError, ValueError):
                pids.add(int(file.read_text()))
        return pids - {os.getpid()}

    def control(self, key: str, stoppable: bool, **more: str) -> int:
        """Run the commands of this directive one after the other; the first failure ends it."""
        lines = self.text.get(key, [])
        limit = float(self.text.get("TimeoutStopSec", 90)) if not stoppable else self.start_limit()
        for line in [lines] if isinstance(lines, str) else lines:
            process = self.launch(line, **more)
            self.unit.update(ControlPID=process.pid)
            deadline = time.monotonic() + limit
            while process.poll() is None:
                if stoppable and self.stop_wanted:
                    process.terminate()
                    raise Stopped
                if time.monotonic() > deadline:
                    process.kill()
                    self.result = "timeout"
                    return 1
                self.tick()
            self.unit.update(ControlPID=0)
            ignore = (line if isinstance(line, str) else line[0]).lstrip("+").startswith("-")
            if process.returncode and not ignore:
                return process.returncode
        return 0

    def start_limit(self) -> float:
        value = self.text.get("TimeoutStartSec", "infinity")
        return float("inf") if value == "infinity" else float(value)

    # the unit's life

    def run(self) -> None:
        import ctypes

        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, self.want_stop)
        self.unit.run.mkdir(parents=True, exist_ok=True)
        while self.once():
            self.restarts += 1
            self.unit.update(NRestarts=self.restarts)

    def want_stop(self, *_signal: t.Any) -> None:
        self.stop_wanted = True

    def once(self) -> bool:
        """Start, serve, stop. True when it is to be started again."""
        self.starts += 1
        self.result = "success"
        self.main = None
        self.announce()
        try:
            self.start()
            while not self.stop_wanted and self.main is not None and self.main.poll() is None:
                self.tick()
            if self.stop_wanted:
                raise Stopped
        except Stopped:
            self.unit.update(ActiveState="deactivating", SubState="stop", Job=2)
            self.control("ExecStop", stoppable=False)
        except RuntimeError as failed:
            self.result = str(failed)
        if self.result == "exec-condition":
            self.unit.update(ActiveState="inactive", SubState="dead", Result=self.result, ControlGroup="", Job="")
            return False
        self.end()
        return self.again()

    def announce(self) -> None:
        """A start begins."""
        invocation = os.urandom(16).hex()
        group = f"/system.slice/{self.unit.name}"
        locked = self.text.get("LimitMEMLOCK", "infinity")
        self.unit.update(InvocationID=invocation, Result="success", ControlGroup=group, Job=1, LimitMEMLOCK=locked)
        with open(self.unit.run / "invocations", "a") as starts:
            starts.write(f"{invocation} {len(self.unit.journal())}\n")
        self.unit.update(ActiveState="activating", SubState="start-pre")

    def start(self) -> None:
        if self.control("ExecCondition", stoppable=True):
            raise RuntimeError("exec-condition")
        if self.control("ExecStartPre", stoppable=True):
            raise RuntimeError(self.result if self.result != "success" else "exit-code")
        self.main = self.launch(self.text["ExecStart"])
        stamp = {"ExecMainStartTimestampMonotonic": now()}
        self.unit.update(MainPID=self.main.pid, SubState="start-post", **stamp)
        self.members()
        # as with Type=exec: an ExecStartPost= command is not ended when the main process dies
        if self.control("ExecStartPost", stoppable=True):
            raise RuntimeError(self.result if self.result != "success" else "exit-code")
        if self.main.poll() is None:
            self.unit.update(ActiveState="active", SubState="running", Job="")

    def end(self) -> None:
        """Signals, left-overs, ExecStopPost, and the last state."""
        self.unit.update(ActiveState="deactivating", SubState="stop-sigterm")
        killed = self.kill_all()
        code = self.main.returncode if self.main else None
        if killed:
            self.result = "timeout"
        elif self.result == "success" and code is not None and not self.well(code):
            self.result = "signal" if code < 0 else "exit-code"
        how = {"EXIT_CODE": "exited", "EXIT_STATUS": str(code)} if code is not None and code >= 0 else {}
        if code is not None and code < 0:
            how = {"EXIT_CODE": "killed", "EXIT_STATUS": signal.Signals(abs(code)).name[3:]}
        status = {"ExecMainCode": 1 if code is None or code >= 0 else 2, "ExecMainStatus": abs(code or 0)}
        self.unit.update(
            SubState="stop-post", MainPID=0, ExecMainExitTimestampMonotonic=now(), Result=self.result, **status
        )
        failed = self.control("ExecStopPost", stoppable=False, SERVICE_RESULT=self.result, **how)
        if failed and self.result == "success":
            self.result = "exit-code"
        for pid in self.members():
            _signal(pid, signal.SIGKILL)
        while self.members():
            _reap()
            time.sleep(STEP)

    def well(self, code: int) -> bool:
        good = [0, *(-number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE))]
        return code in good or code in self.text.get("SuccessExitStatus", [])

    def kill_all(self) -> bool:
        """True when SIGKILL was needed for the main process."""
        mode = self.text.get("KillMode", "control-group")
        alive = self.main is not None and self.main.poll() is None
        targets = self.members() if mode == "control-group" else [self.main.pid] if alive and self.main else []
        for pid in targets:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + float(self.text.get("TimeoutStopSec", 90))
        while time.monotonic() < deadline and self.main is not None and self.main.poll() is None:
            self.tick()
        overdue = self.main is not None and self.main.poll() is None
        if overdue:
            self.unit.update(SubState="stop-sigkill")
        if mode != "process":
            for pid in self.members():
                _signal(pid, signal.SIGKILL)
        if self.main is not None and mode != "none":
            if overdue:
                self.main.kill()
            self.main.wait()
        return overdue

    def again(self) -> bool:
        policy = self.text.get("Restart", "no")
        failed = self.result != "success"
        wanted = not self.stop_wanted and (policy == "always" or (policy == "on-failure" and failed))
        if wanted and self.starts >= int(self.text.get("StartLimitBurst", 5)):
            wanted, failed = False, True
            self.result = "start-limit-hit"
        if wanted:
            self.unit.update(ActiveState="activating", SubState="auto-restart", Result=self.result, Job="")
            deadline = time.monotonic() + float(self.text.get("RestartSec", 0.1))
            while time.monotonic() < deadline and not self.stop_wanted:
                self.tick()
            wanted = not self.stop_wanted
            failed = failed and wanted
        if not wanted:
            last = ("failed", "failed") if failed else ("inactive", "dead")
            self.unit.update(ActiveState=last[0], SubState=last[1], Result=self.result, ControlGroup="", Job="")
        return wanted


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# systemctl


class Usage(Exception):
    """(exit status, message)"""


def spawn(unit: Unit) -> None:
    import subprocess

    unit.run.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-I", "-S", __file__, "supervise", str(unit.root), unit.name]
    unit.update(ActiveState="activating", SubState="start-pre", Job=1, Result="success", NRestarts=0)
    with open(unit.run / "journal", "ab") as journal:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=journal, stderr=journal, start_new_session=True
        )
    (unit.run / "supervisor").write_text(str(process.pid))


def supervise(argv: list[str]) -> int:
    Supervisor(Unit(Path(argv[0]), argv[1])).run()
    return 0


def start(unit: Unit, block: bool) -> int:
    if not unit.exists():
        raise Usage(5, f"Failed to start {unit.name}: Unit {unit.name} not found.")
    if unit.state()["ActiveState"] == "deactivating":
        wait(unit, ("inactive", "failed"))
    if not unit.supervisor():
        spawn(unit)
    if not block:
        return 0
    state = wait(unit, ("active", "inactive", "failed"), ("auto-restart",))
    if state["ActiveState"] == "active" or state["Result"] == "exec-condition":
        return 0  # a condition that does not hold is no failure
    raise Usage(
        1,
        f"Job for {unit.name} failed because the control process exited with error code.\n"
        f'See "systemctl status {unit.name}" and "journalctl -xeu {unit.name}" for details.',
    )


def stop(unit: Unit, block: bool) -> int:
    if not unit.exists() and not unit.supervisor():
        raise Usage(5, f"Failed to stop {unit.name}: Unit {unit.name} not loaded.")
    if pid := unit.supervisor():
        _signal(pid, signal.SIGTERM)
        if block:
            wait(unit, ("inactive", "failed"))
            while unit.supervisor():
                time.sleep(STEP)
    return 0


def restart(unit: Unit, block: bool) -> int:
    stop(unit, block=True)
    return start(unit, block)


def wait(unit: Unit, states: tuple[str, ...], substates: tuple[str, ...] = ()) -> dict[str, str]:
    while True:
        state = unit.state()
        if state["ActiveState"] in states or state["SubState"] in substates:
            return state
        if not unit.supervisor():
            unit.update(ActiveState="failed", SubState="failed", Result="resources")
        time.sleep(STEP)


def reset_failed(unit: Unit, _block: bool) -> int:
    state = unit.state()
    if state["ActiveState"] == "inactive" and state["UnitFileState"] == "disabled":
        # As measured: nothing refers to it, so systemd has not loaded it.
        raise Usage(1, f"Failed to reset failed state of unit {unit.name}: Unit {unit.name} not loaded.")
    if state["ActiveState"] == "failed":
        unit.update(ActiveState="inactive", SubState="dead", Result="success", NRestarts=0)
    return 0


def show(units: list[Unit], wanted: list[str], value_only: bool) -> None:
    blocks = []
    for unit in units:
        state = {**unit.state(), **unit.override()}
        lines = [f"{key}={value}" for key, value in state.items() if not wanted or key in wanted]
        blocks.append("\n".join(line.partition("=")[2] for line in lines) if value_only else "\n".join(lines))
    print("\n\n".join(blocks))


def list_units(root: Path, patterns: list[str], flags: dict[str, str]) -> None:
    import fnmatch

    names = {path.name for path in (root / "run").glob("*")} if (root / "run").exists() else set()
    names |= {path.name[:-5] for path in root.glob("*.json") if "@." not in path.name and ".override" not in path.name}
    rows = []
    for name in sorted(names):
        state = Unit(root, name).state()
        if patterns and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        if "all" in flags or state["ActiveState"] not in ("inactive",):
            rows.append((name, state["LoadState"], state["ActiveState"], state["SubState"], state["Description"]))
    if flags.get("output") == "json":
        print(json.dumps([dict(zip(("unit", "load", "active", "sub", "description"), row)) for row in rows]))
        return
    for row in rows:
        print(" ".join(row))


def kill(unit: Unit, flags: dict[str, str]) -> int:
    name = flags.get("signal", "SIGTERM")
    number = int(name) if name.isdigit() else getattr(signal, name if name.startswith("SIG") else f"SIG{name}")
    whom = flags.get("kill-whom", flags.get("kill-who", "all"))
    pids = [int(unit.state()["MainPID"])] if whom == "main" else _procs(unit)
    for pid in pids:
        if pid > 0:
            _signal(pid, number)
    return 0


def _procs(unit: Unit) -> list[int]:
    path = unit.cgroup / "cgroup.procs"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def parse(argv: list[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Words, flags and properties."""
    words: list[str] = []
    flags: dict[str, str] = {}
    properties: list[str] = []
    short = {"-p": "property", "-n": "lines", "-o": "output", "-s": "signal", "-t": "type", "-u": "unit"}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in short:
            name, equals, value = f"--{short[word]}", "=", rest.pop(0)
        elif word[:2] in short and word[2:] and word[1] != "-":
            name, equals, value = f"--{short[word[:2]]}", "=", word[2:]
        if name[2:] in short.values() and not equals:
            equals, value = "=", rest.pop(0)
        if not name.startswith("-"):
            words.append(word)
        elif name == "--property":
            properties += value.split(",")
        else:
            flags[name.lstrip("-")] = value if equals else ""
    return words, flags, properties


def run(argv: list[str]) -> int:
    words, flags, properties = parse(argv)
    root = Path(os.environ["SIM_UNITS"])
    verb, names = words[0], words[1:]
    units = [Unit(root, name) for name in names]
    for unit in units:
        if failure := unit.override().get("fail"):
            raise Usage(1, failure)
    jobs = {"start": start, "stop": stop, "restart": restart, "reset-failed": reset_failed}
    if verb in jobs:
        return max([jobs[verb](unit, "no-block" not in flags) for unit in units], default=0)
    if verb == "show":
        show(units, properties, "value" in flags)
    elif verb in ("is-active", "is-failed"):
        states = [{**unit.state(), **unit.override()}["ActiveState"] for unit in units]
        print("\n".join(states))
        return 0 if ("active" if verb == "is-active" else "failed") in states else 3
    elif verb == "is-enabled":
        print("\n".join(unit.state()["UnitFileState"] for unit in units))
    elif verb in ("enable", "disable"):
        for unit in units:
            unit.run.mkdir(parents=True, exist_ok=True)
            (unit.run / "enabled").write_text(f"{verb}d")
    elif verb == "list-units":
        list_units(root, names, flags)
    elif verb == "kill":
        return max([kill(unit, flags) for unit in units], default=0)
    elif verb != "daemon-reload":
        raise Usage(1, f"Unknown command verb {verb}.")
    return 0


def systemctl(argv: list[str]) -> int:
    try:
        return run(argv)
    except Usage as failed:
        print(failed.args[1], file=sys.stderr)
        return int(failed.args[0])


def journalctl(argv: list[str]) -> int:
    matches = dict(word.partition("=")[::2] for word in argv if word.startswith("_"))
    _words, flags, _properties = parse([word for word in argv if not word.startswith("_")])
    if flags.get("output") != "cat":
        print("of no line is kept when it came", file=sys.stderr)
        return 1
    unit = Unit(Path(os.environ["SIM_UNITS"]), flags["unit"])
    lines = unit.journal(matches.get("_SYSTEMD_INVOCATION_ID", "")).decode(errors="replace").splitlines()
    print("\n".join(lines[-int(flags.get("lines", "1000000")) :]))
    return 0


if __name__ == "__main__":
    verbs = {"systemctl": systemctl, "journalctl": journalctl, "supervise": supervise}
    sys.exit(verbs[sys.argv[1]](sys.argv[2:]))
