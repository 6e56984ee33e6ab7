# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a client saw of one request, and what that is worth. Pure: no I/O, no clock."""

from __future__ import annotations

import json
import math
import typing as t

FINISHED = ("length", "stop")


class Seen:
    """One streamed request, filled in as its lines arrive."""

    def __init__(self, owed: int) -> None:
        self.owed = owed
        self.status: int | None = None
        self.tokens = 0  # token ids that arrived; a chunk may carry several
        self.usage: int | None = None  # tokens that the server says it sent
        self.finish_reason: str | None = None
        self.done = False  # [DONE]; vLLM sends it after an abort, too
        self.error_event: str | None = None  # the server said so within the stream
        self.error: str | None = None  # the connection or the clock said so

    def line(self, line: bytes) -> int:
        """Take one line of the event stream in; returns how many tokens it brought."""
        if not line.startswith(b"data:"):
            return 0
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return 0
        try:
            event = json.loads(data)
            if "error" in event:
                self.error_event = json.dumps(event["error"])
                return 0
            if event.get("usage"):
                self.usage = event["usage"]["completion_tokens"]
            brought = 0
            for choice in event.get("choices", ()):
                brought += len(choice.get("token_ids") or ())
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        except (ValueError, TypeError, KeyError, AttributeError):
            self.error_event = f"not an event of a completion: {data[:200].decode(errors='replace')}"
            return 0
        self.tokens += brought
        return brought


class Verdict(t.NamedTuple):
    kind: str  # ok, cut, lost
    reason: str


def judge(seen: Seen) -> Verdict:
    """`lost`: the client got nothing. `cut`: it got less than it was owed, whatever the status and [DONE] say."""
    if seen.status is None:
        return Verdict("lost", seen.error or "no response")
    if seen.status != 200:
        return Verdict("lost", f"HTTP {seen.status}")
    if seen.error and not seen.tokens and not seen.error_event:
        return Verdict("lost", f"{seen.error}, before any token")
    if seen.error_event:
        return Verdict("cut", "error event in the stream")
    if seen.error:
        return Verdict("cut", f"{seen.error}, in mid-stream")
    if seen.finish_reason is None:
        return Verdict("cut", "no finish_reason")
    if seen.finish_reason not in FINISHED:
        return Verdict("cut", f"finish_reason {seen.finish_reason}")
    if seen.tokens != seen.owed:
        return Verdict("cut", f"{seen.tokens} tokens of {seen.owed}")
    if seen.usage != seen.tokens:
        return Verdict("cut", f"usage says {seen.usage} tokens, {seen.tokens} arrived")
    if not seen.done:
        return Verdict("cut", "no [DONE]")
    return Verdict("ok", "")


def concurrency(spans: t.Iterable[tuple[float, float]], begin: float, end: float, wanted: int) -> dict[str, float]:
    """Requests in flight between begin and end: least, mean over time, and the seconds with fewer than wanted."""
    if end <= begin:
        return {"min": 0, "mean": 0.0, "below_s": 0.0}
    changes: dict[float, int] = {begin: 0, end: 0}
    for start, stop in spans:
        start, stop = max(start, begin), min(stop, end)
        if start < stop:
            changes[start] = changes.get(start, 0) + 1
            changes[stop] = changes.get(stop, 0) - 1
    moments = sorted(changes)
    level, least, area, below = 0, math.inf, 0.0, 0.0
    for moment, following in zip(moments, moments[1:]):
        level += changes[moment]
        length = following - moment
        least = min(least, level)
        area += level * length
        below += length if level < wanted else 0.0
    return {"min": int(least), "mean": round(area / (end - begin), 3), "below_s": round(below, 3)}


def percentiles(values: t.Iterable[float]) -> dict[str, float | None]:
    """Nearest rank; None where there is nothing to rank."""
    ranked = sorted(values)
    names = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "max": 1.0}
    if not ranked:
        return dict.fromkeys(names)
    return {name: round(ranked[max(0, math.ceil(share * len(ranked)) - 1)], 3) for name, share in names.items()}
