# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json

import pytest
from judge import Seen, concurrency, judge, percentiles


def event(tokens: int = 1, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": [7] * tokens, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode()


def usage(tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode()


DONE = b"data: [DONE]"
ERROR = b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}'
WHOLE = [event(), event(2), event(1, "length"), usage(4), DONE]

# status, lines, error of the connection -> verdict, words of the reason
TABLE = {
    "whole": (200, WHOLE, None, "ok", ""),
    "whole, ended by a stop token": (200, [event(4, "stop"), usage(4), DONE], None, "ok", ""),
    "refused": (None, [], "ConnectError", "lost", "ConnectError"),
    "no answer": (None, [], None, "lost", "no response"),
    "time-out without an answer": (None, [], "time-out after 5 s", "lost", "time-out"),
    "500": (500, [], None, "lost", "HTTP 500"),
    "503": (503, [], None, "lost", "HTTP 503"),
    "404": (404, [], None, "lost", "HTTP 404"),
    "500 that breaks off": (500, [], "ReadError", "lost", "HTTP 500"),
    "reset before a token": (200, [], "ReadError", "lost", "before any token"),
    "time-out before a token": (200, [], "time-out after 5 s", "lost", "before any token"),
    "reset in mid-stream": (200, [event(), event()], "ReadError", "cut", "mid-stream"),
    "time-out in mid-stream": (200, [event()], "time-out after 5 s", "cut", "mid-stream"),
    "reset after the last token": (200, WHOLE[:3], "RemoteProtocolError", "cut", "mid-stream"),
    "empty answer": (200, [], None, "cut", "no finish_reason"),
    "nothing but [DONE]": (200, [DONE], None, "cut", "no finish_reason"),
    "early [DONE]": (200, [event(), event(), DONE], None, "cut", "no finish_reason"),
    "early [DONE] with usage": (200, [event(), usage(1), DONE], None, "cut", "no finish_reason"),
    "aborted": (200, [event(), event(1, "abort"), usage(2), DONE], None, "cut", "finish_reason abort"),
    "aborted with all its tokens": (200, [event(4, "abort"), usage(4), DONE], None, "cut", "finish_reason abort"),
    "error event": (200, [event(), ERROR, DONE], None, "cut", "error event"),
    "error event before a token": (200, [ERROR, DONE], None, "cut", "error event"),
    "error event, then a reset": (200, [ERROR], "ReadError", "cut", "error event"),
    "too few tokens": (200, [event(3, "length"), usage(3), DONE], None, "cut", "3 tokens of 4"),
    "too many tokens": (200, [event(5, "length"), usage(5), DONE], None, "cut", "5 tokens of 4"),
    "tokens lost on the way": (200, [event(3), event(0, "length"), usage(4), DONE], None, "cut", "3 tokens of 4"),
    "usage below": (200, [event(4, "length"), usage(3), DONE], None, "cut", "usage says 3"),
    "no usage": (200, [event(4, "length"), DONE], None, "cut", "usage says None"),
    "no [DONE]": (200, WHOLE[:4], None, "cut", "no [DONE]"),
    "no event at all": (200, [b"data: <html>"], None, "cut", "error event"),
}


@pytest.mark.parametrize(("status", "lines", "error", "kind", "reason"), TABLE.values(), ids=TABLE)
def test_judge(status, lines, error, kind, reason):
    seen = Seen(owed=4)
    seen.status, seen.error = status, error
    for line in lines:
        seen.line(line)
    verdict = judge(seen)
    assert verdict.kind == kind
    assert reason in verdict.reason
    assert bool(verdict.reason) == (kind != "ok")


@pytest.mark.parametrize(
    "line", [b"", b": ping", b"event: x", DONE, usage(3), b'data: {"choices": [{"delta": {"role": "assistant"}}]}']
)
def test_a_line_without_tokens_brings_none(line):
    seen = Seen(owed=4)
    assert seen.line(line) == 0
    assert seen.tokens == 0
    assert seen.error_event is None


@pytest.mark.parametrize(
    "data",
    [b"{", b"null", b"[]", b"7", b'{"choices": 7}', b'{"choices": [7]}', b'{"usage": 7}', b'{"usage": {"x": 1}}',
     b'{"choices": [{"token_ids": 7}]}', b"\xff\xfe"],
)  # fmt: skip
def test_a_malformed_event_counts_as_an_error(data):
    seen = Seen(owed=1)
    seen.status = 200
    seen.line(b"data: " + data)
    for line in (event(1, "length"), usage(1), DONE):
        seen.line(line)
    assert judge(seen).kind == "cut"


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 10), (0, 10)], {"min": 2, "mean": 2.0, "below_s": 0.0}),
        ([(0, 4), (4, 10), (0, 10)], {"min": 2, "mean": 2.0, "below_s": 0.0}),  # handed over without a gap
        ([(0, 4), (5, 10), (0, 10)], {"min": 1, "mean": 1.9, "below_s": 1.0}),
        ([(0, 3), (0, 10)], {"min": 1, "mean": 1.3, "below_s": 7.0}),
        ([(-5, 15), (-5, 15), (11, 12), (-3, 0)], {"min": 2, "mean": 2.0, "below_s": 0.0}),  # outside does not count
        ([(0, 10), (0, 10), (2, 4)], {"min": 2, "mean": 2.2, "below_s": 0.0}),
        ([], {"min": 0, "mean": 0.0, "below_s": 10.0}),
    ],
)
def test_concurrency(spans, expected):
    assert concurrency(spans, 0, 10, wanted=2) == expected


def test_concurrency_of_no_time_is_none():
    assert concurrency([(0, 10)], 5, 5, wanted=1) == {"min": 0, "mean": 0.0, "below_s": 0.0}


def test_percentiles():
    assert percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None, "max": None}
