# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The clients against a real server on a real socket, which answers as engines do when they fail."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import struct
import sys
from pathlib import Path

import pytest
from load import Load, parse_arguments, parse_mix

LOAD = Path(__file__).parents[2] / "load" / "load.py"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Answers each request by the next word of its script, and by `whole` from then on."""

    def __init__(self, *script: str, pause: float = 0.0) -> None:
        self.script = list(script)
        self.pause = pause
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.started = asyncio.Event()
        self.handlers: set[asyncio.Task] = set()

    async def __aenter__(self) -> Server:
        self.server = await asyncio.start_server(self.connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.server.close()
        for task in self.handlers:
            task.cancel()
        await asyncio.gather(*self.handlers, return_exceptions=True)
        await self.server.wait_closed()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.handlers.add(task)
        try:
            while await self.one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self.handlers.discard(task)
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.paths.append(head[0].split()[1])
        self.started.set()
        return await self.answer(self.script.pop(0) if self.script else "whole", body["max_tokens"], writer)

    async def answer(self, word: str, owed: int, writer: asyncio.StreamWriter) -> bool:
        async def send(data: str) -> None:
            text = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(text), text))
            await writer.drain()

        def token(finish_reason: str | None = None) -> str:
            return json.dumps({"choices": [{"token_ids": [1], "finish_reason": finish_reason}]})

        def reset() -> bool:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            return False

        if word == "reset":
            return reset()
        if word == "silence":
            await asyncio.sleep(30)
        if word == "500":
            writer.write(b"HTTP/1.1 500 x\r\ncontent-length: 25\r\n\r\nengine is being shut down")
            return True
        writer.write(HEAD)
        if word == "head":
            await writer.drain()
            return reset()
        arrive = owed if word == "whole" else owed // 2
        for number in range(arrive):
            await send(token("length" if word == "whole" and number == arrive - 1 else None))
            await asyncio.sleep(self.pause)
        if word == "truncated":
            writer.close()
            return False
        if word == "error":
            await send('{"error": {"message": "EngineCore died", "code": 500}}')
        elif word == "abort":
            await send('{"choices": [{"token_ids": [], "finish_reason": "abort"}]}')
        await send(json.dumps({"choices": [], "usage": {"completion_tokens": arrive}}))
        await send("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def options(url: str, *arguments: str) -> argparse.Namespace:
    common = ["--url", url, "--model", "tiny", "--mix", "short=4-8", "--retry-pause", "0.01"]
    return parse_arguments([*common, *arguments])


async def run_against(server: Server, *arguments: str) -> dict:
    async with server:
        return await Load(options(server.url, *arguments)).run()


FAULTS = {
    "500": ("lost", "HTTP 500"),
    "reset": ("lost", ""),
    "head": ("lost", "before any token"),
    "silence": ("lost", "time-out"),
    "truncated": ("cut", "mid-stream"),
    "early": ("cut", "no finish_reason"),
    "abort": ("cut", "finish_reason abort"),
    "error": ("cut", "error event"),
}


@pytest.mark.parametrize(("word", "kind", "reason"), [(word, *what) for word, what in FAULTS.items()], ids=FAULTS)
def test_a_fault_is_judged(word, kind, reason):
    server = Server("whole", word)
    report = asyncio.run(run_against(server, "--streams", "1", "--requests", "4", "--timeout", "0.7"))
    other = "cut" if kind == "lost" else "lost"
    assert report["counts"] == {"requests": 4, "ok": 3, kind: 1, other: 0}
    (failure,) = report["failures"]
    assert failure["request"] == 2
    assert failure["verdict"] == kind
    assert reason in failure["reason"]
    assert failure["tokens"] == (failure["owed"] // 2 if kind == "cut" else 0)
    if word == "500":
        assert "shut down" in failure["body"]
        assert failure["status"] == 500


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        report = asyncio.run(Load(options(url, "--streams", "2", "--requests", "6")).run())
    assert report["counts"]["lost"] == report["counts"]["requests"] >= 6
    assert "ConnectError" in report["failures"][0]["reason"]


def test_all_streams_stay_busy_and_ask_for_what_is_counted():
    server = Server(pause=0.003)
    report = asyncio.run(run_against(server, "--streams", "4", "--requests", "40", "--mix", "short=4-8:3,long=20-30:1"))
    counts = report["counts"]
    assert counts["ok"] == counts["requests"] == len(server.bodies)
    assert 40 <= counts["requests"] <= 43
    assert report["concurrency"] == {"min": 4, "mean": 4.0, "below_s": 0.0}
    assert report["tokens"] == sum(body["max_tokens"] for body in server.bodies)
    assert set(report["kinds"]) == {"short", "long"}
    assert set(server.paths) == {"/v1/completions", "/v1/chat/completions"}
    assert report["longest_gap_s"]["p50"] >= 0.003
    for body in server.bodies:
        assert body["stream"] and body["ignore_eos"] and body["return_token_ids"]
        assert ("prompt" in body) != ("messages" in body)


def test_a_client_that_waits_after_a_loss_is_not_in_flight():
    server = Server("500", pause=0.01)
    report = asyncio.run(run_against(server, "--streams", "2", "--requests", "12", "--retry-pause", "0.1"))
    assert report["concurrency"]["min"] == 1
    assert report["concurrency"]["below_s"] == pytest.approx(0.1, abs=0.08)


@pytest.mark.parametrize(("arguments", "why"), [(["--seconds", "0.5"], "seconds"), (["--until-file"], "until-file")])
def test_ends_by_time_or_file_and_lets_requests_finish(tmp_path, arguments, why):
    stop, running = tmp_path / "stop", tmp_path / "running"
    if why == "until-file":
        arguments = [*arguments, str(stop)]

    async def run() -> dict:
        async with Server(pause=0.05) as server:
            load = asyncio.create_task(
                Load(options(server.url, "--streams", "2", "--running-file", str(running), *arguments)).run()
            )
            while not running.exists():
                await asyncio.sleep(0.01)
            stop.touch()
            return await asyncio.wait_for(load, 10)

    report = asyncio.run(run())
    assert report["ended_by"] == why
    assert report["counts"]["ok"] == report["counts"]["requests"] >= 2


@pytest.mark.parametrize(("script", "status"), [([], 0), (["early"], 1)])
def test_sigterm_ends_it_with_a_report(tmp_path, script, status):
    out = tmp_path / "report.json"

    async def run() -> int:
        async with Server(*script, pause=0.05) as server:
            arguments = ["--url", server.url, "--model", "tiny", "--streams", "2", "--mix", "short=8"]
            process = await asyncio.create_subprocess_exec(sys.executable, str(LOAD), *arguments, "--out", str(out))
            await asyncio.wait_for(server.started.wait(), 20)
            process.send_signal(signal.SIGTERM)
            return await asyncio.wait_for(process.wait(), 20)

    assert asyncio.run(run()) == status
    report = json.loads(out.read_text())
    assert (report["schema"], report["version"], report["ended_by"]) == ("baremetal.vllm/load", 1, "signal")
    assert report["counts"]["requests"] == report["counts"]["ok"] + status == 2


@pytest.mark.parametrize("text", ["", "short", "short=", "short=0-4", "short=9-4", "short=4-9:0", "=4-9", "short=a-b"])
def test_a_wrong_mix_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"NAME=MIN-MAX:WEIGHT|wants a name"):
        parse_mix(text)
