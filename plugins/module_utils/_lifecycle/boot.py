# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How far a start has come, by what vLLM logs. It is for people to read: nothing is decided by it."""

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
        (r"init engine \(profile", "starts its API server"),
        (r"Starting vLLM server|Application startup complete", "listens"),
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
