# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Streaming clients for a vLLM fleet. Each client has one request in flight at any moment, and each request is judged.

Every request asks for an exact number of tokens (temperature 0, ignore_eos) and for their ids, so that what arrived can
be counted instead of believed. Ends after --seconds, after --requests, when --until-file appears or on SIGTERM;
requests in flight then still finish. Exit status: 0 each request got what it was owed, 1 some did not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import sys
import time
import typing as t
from pathlib import Path

import httpx
from judge import Seen, Verdict, concurrency, judge, percentiles

WORDS = ("engine", "gate", "router", "host", "drain", "serve", "token", "stream", "weight", "start", "stop", "fleet")
MAX_FAILURES_LISTED = 200
EXCERPT = 300


class Length(t.NamedTuple):
    name: str
    low: int
    high: int
    weight: int


class Result(t.NamedTuple):
    number: int
    kind: str
    api: str
    started: float
    ended: float
    first_token: float | None
    stall: float
    seen: Seen
    verdict: Verdict
    excerpt: str


def parse_mix(text: str) -> list[Length]:
    mix = []
    for part in text.split(","):
        try:
            name, _unused, rest = part.partition("=")
            lengths, _unused, weight = rest.partition(":")
            low, _unused, high = lengths.partition("-")
            length = Length(name.strip(), int(low), int(high or low), int(weight or 1))
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{part}' is not NAME=MIN-MAX:WEIGHT") from None
        if not (length.name and 0 < length.low <= length.high and length.weight > 0):
            raise argparse.ArgumentTypeError(f"'{part}' wants a name, 0 < MIN <= MAX and a weight above 0")
        mix.append(length)
    return mix


class Load:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.results: list[Result] = []
        self.issued = 0
        self.streaming: set[int] = set()  # clients that have had a token
        self.stop = asyncio.Event()
        self.stopped_at: float | None = None
        self.ended_by = ""
        self.started = time.monotonic()
        self.started_at = time.time()

    def end(self, why: str, at: float | None = None) -> None:
        if not self.stop.is_set():
            self.ended_by, self.stopped_at = why, at or time.monotonic()
            self.stop.set()

    def next_request(self) -> tuple[str, str, dict[str, t.Any], int]:
        length = self.random.choices(self.options.mix, [length.weight for length in self.options.mix])[0]
        owed = self.random.randint(length.low, length.high)
        prompt = " ".join(self.random.choices(WORDS, k=self.random.randint(4, 24)))
        body = {
            "model": self.options.model,
            "max_tokens": owed,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        api = self.options.api if self.options.api != "both" else ("completions", "chat")[self.issued % 2]
        if api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        self.issued += 1
        return length.name, api, body, owed

    async def request(self, client: httpx.AsyncClient, stream: int, started: float) -> Result:
        kind, api, body, owed = self.next_request()
        number = self.issued
        seen = Seen(owed)
        path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
        first: float | None = None
        last = started
        stall = 0.0
        tail = b""
        try:
            async with asyncio.timeout(self.options.timeout):
                async with client.stream("POST", path, json=body) as response:
                    seen.status = response.status_code
                    pending = b""
                    async for chunk in response.aiter_raw():
                        tail = chunk[-EXCERPT:]
                        *lines, pending = (pending + chunk).split(b"\n")
                        if sum([seen.line(line) for line in lines]):
                            now = time.monotonic()
                            if first is None:
                                first = now
                                self.note_streaming(stream)
                            else:
                                stall = max(stall, now - last)
                            last = now
        except TimeoutError:
            seen.error = f"time-out after {self.options.timeout:g} s"
        except httpx.HTTPError as exc:
            seen.error = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        verdict = judge(seen)
        excerpt = "" if verdict.kind == "ok" else (seen.error_event or tail.decode(errors="replace"))[:EXCERPT]
        return Result(number, kind, api, started, time.monotonic(), first, stall, seen, verdict, excerpt)

    def note_streaming(self, stream: int) -> None:
        if len(self.streaming) < self.options.streams:
            self.streaming.add(stream)
            if len(self.streaming) == self.options.streams and self.options.running_file:
                self.options.running_file.write_text("running\n")

    async def client(self, http: httpx.AsyncClient, stream: int) -> None:
        started = time.monotonic()
        while not self.stop.is_set():
            result = await self.request(http, stream, started)
            self.results.append(result)
            started = result.ended  # the next request begins where this one ended
            if self.issued >= self.options.limit:
                self.end("requests", at=result.ended)
            elif result.verdict.kind == "lost":
                await asyncio.sleep(self.options.retry_pause)  # as a client would; the gap counts as not in flight
                started = time.monotonic()

    async def watch(self) -> None:
        """Ends the load by time or by file, and says once in a while how it goes."""
        told = self.started
        while not self.stop.is_set():
            now = time.monotonic()
            if now - self.started >= self.options.seconds:
                self.end("seconds")
            elif self.options.until_file and self.options.until_file.exists():
                self.end("until-file")
            elif now - told >= self.options.progress:
                told = now
                counts = collections.Counter(result.verdict.kind for result in self.results)
                print(
                    f"load: {now - self.started:.0f} s, {counts['ok']} ok, {counts['cut']} cut, {counts['lost']} lost",
                    file=sys.stderr,
                    flush=True,
                )
            await asyncio.sleep(0.2)

    async def run(self) -> dict[str, t.Any]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end, "signal")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.options.streams)
        times = httpx.Timeout(self.options.timeout, connect=min(10.0, self.options.timeout))
        async with (
            httpx.AsyncClient(base_url=self.options.url, limits=limits, timeout=times, trust_env=False) as http,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self.watch())
            for stream in range(self.options.streams):
                group.create_task(self.client(http, stream))
        return self.report()

    def report(self) -> dict[str, t.Any]:
        results = sorted(self.results, key=lambda result: result.number)
        counts = collections.Counter(result.verdict.kind for result in results)
        kinds = collections.Counter(result.kind for result in results)
        fine = [result for result in results if result.verdict.kind == "ok"]
        failures = [result for result in results if result.verdict.kind != "ok"]
        ended = max((result.ended for result in results), default=self.started)
        tokens = sum(result.seen.tokens for result in results)
        # In flight is measured from the first request of the last client to the moment that asked for the end.
        spans = [(result.started, result.ended) for result in results]
        begin = max((start for start, _unused in spans[: self.options.streams]), default=self.started)
        return {
            "schema": "baremetal.vllm/load",
            "version": 1,
            "url": self.options.url,
            "model": self.options.model,
            "streams": self.options.streams,
            "mix": [length._asdict() for length in self.options.mix],
            "seed": self.options.seed,
            "started_at": round(self.started_at, 3),
            "wall_s": round(ended - self.started, 3),
            "ended_by": self.ended_by,
            "counts": {"requests": len(results), **{kind: counts[kind] for kind in ("ok", "cut", "lost")}},
            "kinds": dict(kinds),
            "tokens": tokens,
            "tokens_per_s": round(tokens / max(ended - self.started, 0.001), 1),
            "concurrency": concurrency(spans, begin, self.stopped_at or ended, self.options.streams),
            "latency_s": percentiles(result.ended - result.started for result in fine),
            "first_token_s": percentiles(result.first_token - result.started for result in fine if result.first_token),
            "longest_gap_s": percentiles(result.stall for result in fine),
            "reasons": dict(collections.Counter(f"{r.verdict.kind}: {r.verdict.reason}" for r in failures)),
            "failures": [
                {
                    "request": result.number,
                    "verdict": result.verdict.kind,
                    "reason": result.verdict.reason,
                    "kind": result.kind,
                    "api": result.api,
                    "started_s": round(result.started - self.started, 3),
                    "ended_s": round(result.ended - self.started, 3),
                    "status": result.seen.status,
                    "finish_reason": result.seen.finish_reason,
                    "tokens": result.seen.tokens,
                    "owed": result.seen.owed,
                    "body": result.excerpt,
                }
                for result in failures[:MAX_FAILURES_LISTED]
            ],
        }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the router, as in http://10.77.0.10:8000")
    parser.add_argument("--model", required=True, help="the served model name")
    parser.add_argument("--streams", type=int, default=8, help="requests in flight at any moment (default 8)")
    mix_help = "what is asked for, in tokens: NAME=MIN-MAX:WEIGHT, joined by commas (default %(default)s)"
    parser.add_argument("--mix", type=parse_mix, default="short=16-48:3,long=192-384:1", help=mix_help)
    parser.add_argument("--api", choices=("completions", "chat", "both"), default="both")
    parser.add_argument("--until-file", type=Path, help="end when this file exists")
    parser.add_argument("--running-file", type=Path, help="write this file once every client has had a token")
    parser.add_argument("--seconds", type=float, default=3600, help="end after this time (default, and bound, 3600)")
    parser.add_argument("--requests", type=int, help="end after this number of requests")
    parser.add_argument("--max-requests", type=int, default=20000, help="a bound that always holds (default 20000)")
    parser.add_argument("--timeout", type=float, default=120, help="for one request, from start to end (default 120)")
    parser.add_argument(
        "--retry-pause", type=float, default=1, help="a client's pause after a lost request (default 1)"
    )
    parser.add_argument("--progress", type=float, default=10, help="seconds between lines on stderr (default 10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the report (default: stdout)")
    options = parser.parse_args(arguments)
    if min(options.streams, options.timeout, options.max_requests, options.seconds) <= 0:
        parser.error("--streams, --timeout, --seconds and --max-requests want a number above 0")
    options.seconds = min(options.seconds, 3600)
    options.limit = min(options.requests or options.max_requests, options.max_requests)
    return options


def main() -> int:
    options = parse_arguments()

    async def measure() -> dict[str, t.Any]:
        return await Load(options).run()

    report = asyncio.run(measure())
    text = json.dumps(report, indent=2) + "\n"
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draft = options.out.with_name(options.out.name + ".new")
        draft.write_text(text)
        os.replace(draft, options.out)
    else:
        print(text, end="")
    return 0 if report["counts"]["ok"] == report["counts"]["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
