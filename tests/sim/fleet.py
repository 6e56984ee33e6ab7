"""The engines of many hosts in one process, where a process for each engine and its supervisor would be too much.

    python tests/sim/fleet.py REQUESTS

REQUESTS is a pipe that bin/systemctl writes to where $SIM_FLEET names it; each host has a pipe `answer` in its
$SIM_UNITS. Units are those of systemd.py, engines those of engine.py: what differs is that an engine has no process of
its own. A `sleep` stands for it, with a process id that can be looked at and ends with the unit. What only happens to
processes does not happen here: faults of the start, restarts by systemd, crashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import traceback
import typing as t
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "sim"

from sim import options
from sim.engine import Engine
from sim.systemd import Supervisor, Unit, now, parse, reset_failed


class Tenant(Engine):
    """An engine in this process."""

    def child(self, _sock: t.Any) -> int:
        return subprocess.Popen(["sleep", "infinity"]).pid

    async def listen(self, sock: t.Any) -> None:
        self.http = self.server()
        loop = asyncio.get_running_loop()
        self.schedulers = [loop.create_task(core.schedule()) for core in self.cores]
        self.listener = await asyncio.start_unix_server(self.http.connection, sock=sock)

    async def end(self) -> None:
        """As at SIGTERM; the socket file stays."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self.shut_down(ended, self.http)
        self.listener.close()
        for task in self.schedulers:
            task.cancel()
        self.kill_cores()


class Hosted(Supervisor):
    """A unit whose engine is in this process."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self.engine: Tenant | None = None
        self.order = asyncio.Lock()

    def living_main(self) -> dict[str, str]:
        return {"MAINPID": str(self.engine.pids[0])} if self.engine else {}

    async def do(self, verb: str) -> int:
        """The exit status."""
        async with self.order:
            try:
                if verb in ("stop", "restart"):
                    await self.finish()
                if verb in ("start", "restart"):
                    await self.begin()
            except Exception:  # noqa: BLE001 - whatever it is, the host must not wait for it in vain
                traceback.print_exc()
                self.unit.update(ActiveState="failed", SubState="failed", Result="exit-code", Job="")
                return 1
        return 0

    async def commands(self, key: str, **more: str) -> None:
        lines = self.text.get(key, [])
        for line in [lines] if isinstance(lines, str) else lines:
            status = await asyncio.to_thread(self.launch(line, **more).wait)
            if status:
                raise RuntimeError(f"{self.unit.name}: {key} ended with {status}")

    async def begin(self) -> None:
        if self.engine is None:
            self.unit.update(ActiveState="activating", SubState="start-pre", Job=1)  # as in spawn(), before all else
            self.announce()
            await self.commands("ExecStartPre")
            sock = self.load()
            assert self.engine is not None
            self.unit.update(MainPID=self.engine.pids[0], SubState="start-post", ExecMainStartTimestampMonotonic=now())
            self.unit.group(self.engine.pids)
            await self.engine.listen(sock)
            await self.commands("ExecStartPost")
            self.unit.update(ActiveState="active", SubState="running")
        self.unit.update(Job="")

    def load(self) -> t.Any:
        """An engine reads its environment while it starts."""
        before = dict(os.environ)
        os.environ.update(self.environment())
        try:
            with open(self.unit.run / "journal", "a") as journal, contextlib.redirect_stdout(journal):
                words = self.words(self.text["ExecStart"])
                self.engine = Tenant(options.parse(words[words.index("serve") :], "engine"))
                return self.engine.start()
        finally:
            os.environ.clear()
            os.environ.update(before)

    async def finish(self) -> None:
        if self.engine is not None:
            self.unit.update(ActiveState="deactivating", SubState="stop")
            await self.commands("ExecStop")
            self.unit.update(SubState="stop-sigterm")
            await self.engine.end()
            self.engine = None
            self.unit.group([])
            self.unit.update(SubState="stop-post", MainPID=0, ExecMainExitTimestampMonotonic=now())
            await self.commands("ExecStopPost", SERVICE_RESULT="success", EXIT_CODE="exited", EXIT_STATUS="0")
        self.unit.update(ActiveState="inactive", SubState="dead", ControlGroup="", Job="")


class Fleet:
    def __init__(self) -> None:
        self.hosted: dict[Path, Hosted] = {}

    async def serve(self, requests: str) -> None:
        pipe = os.open(requests, os.O_RDWR | os.O_NONBLOCK)  # for writing too, so that it has no end
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0))
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            root, _tab, words = line.decode().rstrip("\n").partition("\t")
            task = loop.create_task(self.answer(Path(root), words.split()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def answer(self, root: Path, argv: list[str]) -> None:
        (verb, name), flags, _properties = parse([word for word in argv if word != "--"])
        unit = Unit(root, name)
        if verb == "reset-failed":
            return self.tell(root, reset_failed(unit, True))
        if unit.run not in self.hosted:
            self.hosted[unit.run] = Hosted(unit)
        hosted = self.hosted[unit.run]
        if "no-block" in flags:
            unit.update(Job=1)
            self.tell(root, 0)
        status = await hosted.do(verb)
        if "no-block" not in flags:
            self.tell(root, status)
        return None

    @staticmethod
    def tell(root: Path, status: int) -> None:
        pipe = os.open(root / "answer", os.O_RDWR | os.O_NONBLOCK)
        os.write(pipe, f"{status}\n".encode())
        os.close(pipe)


if __name__ == "__main__":
    asyncio.run(Fleet().serve(sys.argv[1]))
