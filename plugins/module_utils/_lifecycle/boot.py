# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How far a start has come, and what it consisted of, by what vLLM logs. Nothing is decided by it."""

from __future__ import annotations

import re
import typing as t

# What was logged last counts. A share is where the line has one. Of vLLM 0.31 to 0.33.
_PHASES = tuple(
    (re.compile(pattern), says)
    for pattern, says in (
        (r"Prefetching checkpoint files: *(\d+)%", "reads the checkpoint"),
        (r"Initializing a V1 LLM engine|Starting to load model|Initializing model took", "loads the model"),
        (r"Loading safetensors[^:]*: *(\d+)%", "loads the weights"),
        (r"Loading weights took|Mapped \d+ tensors", "has its weights"),
        (r"Model loading took", "has its weights, profiles and compiles"),
        (r"torch\.compile took|Dynamo bytecode transform time|Directly load AOT compilation", "compiles and profiles"),
        (r"Capturing CUDA graphs[^:]*: *(\d+)%", "captures graphs"),
        (r"Graph capturing finished", "has captured graphs"),
        (r"init engine \(profile|Available routes are|Route: \S+, Methods", "starts its API server"),
        (r"Starting vLLM server|Application startup complete", "listens"),
    )
)
# What a start consists of, each part with the line that ends it. The rest, until it answers, is ``serve``.
_ENDS = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        ("import", r"Initializing a V1 LLM engine"),
        ("load", r"Model loading took|Loading weights took"),
        ("compile", r"torch\.compile took"),
        ("profile", r"init engine \(profile"),
    )
)
# Lines of the unit's own commands about this engine, but for those that only say that it is not ready yet.
_OURS = re.compile(r"(?P<name>\S+): (?!not ready)(?P<says>.+)")


def phase(journal: t.Sequence[str], name: str) -> str:
    """Pure. What the last line means that means anything; "" when none does. ``name`` is the engine's."""
    for lines in reversed(journal):
        # Progress bars go back to the beginning of their line and write on.
        for line in reversed(lines.split("\r")):
            ours = _OURS.fullmatch(line)
            if ours and ours["name"] == name:
                return ours["says"]
            for pattern, says in _PHASES:
                if found := pattern.search(line):
                    return f"{says}, {found[1]} %" if pattern.groups else says
    return ""


def parts(log: t.Sequence[tuple[float, str]], began: float, served: float) -> dict[str, float]:
    """Pure. The seconds of each part of a start, in their order; empty when the log says nothing of them.

    Of several ranks the last one ends a part. One whose end was not logged belongs to the next.

    :param log: lines, each with its time; all times are seconds on one clock.
    """
    found: dict[str, float] = {}
    since = began
    for part, pattern in _ENDS:
        ends = [at for at, line in log if since <= at <= served and pattern.search(line)]
        if ends:
            found[part] = round(max(ends) - since, 3)
            since = max(ends)
    return {**found, "serve": round(served - since, 3)} if found else {}
