"""HTTP/1.1 over a Unix socket, as far as vLLM's clients need it, and every way to do it wrong.

Written here rather than taken from uvicorn and starlette for two reasons: an engine of theirs takes 0.4 s to start
where this one takes 0.1 s (tests start hundreds), and they refuse to send what the faults need: a truncated body,
a connection that closes in the middle, an answer that is no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
import typing as t
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

from .faults import Switches

FAULTS_BEFORE = ("http_reset", "http_garbage", "http_hang", "http_500", "http_404")
FAULTS_AFTER = ("http_lost", "http_empty", "http_html", "http_not_json", "http_wrong_types", "http_list")


class Request:
    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes, gone: asyncio.Event) -> None:
        self.method = method
        self.target = target
        parts = urlsplit(target)
        self.path = unquote(parts.path)
        self.query = parse_qs(parts.query, keep_blank_values=True)
        self.headers = headers
        self.body = body
        self.gone = gone  # set when the client has closed the connection

    def first(self, name: str, default: str) -> str:
        return self.query.get(name, [default])[0]


class Response:
    def __init__(self, status: int = 200, body: bytes = b"", kind: str = "application/json", **headers: str) -> None:
        self.status = status
        self.body = body
        self.headers = {"content-type": kind, **headers} if kind and (body or kind != "application/json") else headers


class Stream:
    """Server-sent events; a chunk for each write."""

    def __init__(self, chunks: t.AsyncIterator[bytes]) -> None:
        self.chunks = chunks


def answer(content: t.Any, status: int = 200) -> Response:
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return Response(status, text.encode())


Handler = t.Callable[[Request], t.Awaitable[t.Union[Response, Stream]]]


class Server:
    def __init__(self, handler: Handler, faults: Switches) -> None:
        self.handler = handler
        self.faults = faults
        self.streaming = 0  # answers under way

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self.exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection is to be closed."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _version = first.split(" ", 2)
        headers = {
            name.lower(): value.strip() for name, _unused, value in (line.partition(":") for line in lines if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        gone = asyncio.Event()
        watch = asyncio.ensure_future(self.watch(reader, gone))
        self.streaming += 1
        try:
            request = Request(method, target, headers, body, gone)
            self.faults.read()
            if (name := self.before(request)) is not None:
                return await self.fault_before(name, request, writer)
            reply = await self.handler(request)
            if isinstance(reply, Stream):
                return await self.send_stream(reply, writer)
            return await self.send(request, reply, writer)
        finally:
            self.streaming -= 1
            watch.cancel()

    @staticmethod
    async def watch(reader: asyncio.StreamReader, gone: asyncio.Event) -> None:
        """No client of ours sends its next request before the answer, so until then only an end can come."""
        while not reader.at_eof() and reader.exception() is None:
            await asyncio.sleep(0.02)
        gone.set()

    def before(self, request: Request) -> str | None:
        return next((name for name in FAULTS_BEFORE if self.faults.on_path(name, request.path, request.method)), None)

    async def fault_before(self, name: str, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Instead of an answer; False when the connection is to be closed."""
        if name == "http_garbage":
            writer.write(b"\x15\x03\x01\x00\x02\x02\x16 this is no HTTP\r\n")
        elif name == "http_hang":
            await request.gone.wait()
        elif name in ("http_500", "http_404"):
            status = int(name[-3:])
            detail = {500: "Internal Server Error", 404: "Not Found"}[status]
            content = {"detail": detail} if status == 404 else _error(detail)
            await self.write(writer, answer(content, status))
            return True
        return False

    async def send(self, request: Request, reply: Response, writer: asyncio.StreamWriter) -> bool:
        slow = self.faults.get("http_slow")
        if slow is not None:
            path, _unused, seconds = str(slow).rpartition(":")
            if path in ("", request.path):
                await asyncio.sleep(float(seconds) if slow is not True else 1)
        name = next((name for name in FAULTS_AFTER if self.faults.on_path(name, request.path, request.method)), None)
        if name == "http_lost":
            return False
        if name is not None:
            reply = _spoilt(name, reply)
        if self.faults.on_path("http_truncated", request.path, request.method):
            await self.write(writer, reply, cut=max(1, len(reply.body) // 2))
            return False
        if self.faults.on_path("http_dribble", request.path, request.method):
            await self.write(writer, reply, pause=0.05)
            return True
        if self.faults.on_path("http_endless", request.path, request.method):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            while not request.gone.is_set():
                writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.005)
            return False
        await self.write(writer, reply)
        return True

    @staticmethod
    async def write(
        writer: asyncio.StreamWriter, reply: Response, cut: int | None = None, pause: float | None = None
    ) -> None:
        writer.write(_head(reply.status, {**reply.headers, "content-length": str(len(reply.body))}))
        if pause is None:
            writer.write(reply.body[:cut])
        else:
            for byte in reply.body:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(pause)
        await writer.drain()

    @staticmethod
    async def send_stream(reply: Stream, writer: asyncio.StreamWriter) -> bool:
        kind = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
        writer.write(_head(200, kind))
        async for chunk in reply.chunks:
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _error(message: str) -> dict[str, t.Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


def _head(status: int, headers: dict[str, str]) -> bytes:
    reason = HTTPStatus(status).phrase
    fixed = {"date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()), "server": "uvicorn"}
    lines = [f"HTTP/1.1 {status} {reason}"] + [f"{name}: {value}" for name, value in {**fixed, **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _spoilt(name: str, reply: Response) -> Response:
    if name == "http_empty":
        return Response(reply.status)
    if name == "http_html":
        return Response(200, b"<html><body>502 Bad Gateway</body></html>", "text/html")
    if name == "http_not_json":
        return Response(reply.status, reply.body[:-1] + b",,}")
    try:
        content = json.loads(reply.body or b"{}")
    except ValueError:
        content = {"text": reply.body.decode("latin-1")}
    if name == "http_list":
        return answer([content], reply.status)
    return answer({key: f"{value}?" for key, value in content.items()}, reply.status)
