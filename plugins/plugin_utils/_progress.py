# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which lines of progress are worth showing. Pure. Private to this collection."""

from __future__ import annotations

import typing as t

from ansible.module_utils.parsing.convert_bool import boolean

EVERY = 10.0
MOST = 60.0
# A sentence that stands is repeated that seldom, and with the time for which it has stood.
REPEAT = 30.0
WORTH_A_TIME = 10.0
# Callbacks whose output is data, or a picture, or a line for each result.
QUIET = ("dense", "json", "jsonl", "null", "oneline", "selective")


def seconds_between(wanted: t.Any) -> float:
    """What ``vllm_progress`` means: true for the default, false or 0 for none at all.

    :raises ValueError: it means nothing.
    """
    try:
        seconds = float(wanted) if not isinstance(wanted, bool) else EVERY * wanted
    except (TypeError, ValueError):
        try:
            seconds = EVERY * boolean(wanted)
        except TypeError:
            seconds = -1.0
    if not 0 <= seconds <= MOST:
        raise ValueError(f"vllm_progress must be true, false or seconds from 0 to {MOST:g}, not {wanted!r}")
    return seconds


def is_quiet(callback: str, ok_hosts: t.Any) -> bool:
    """Whether the output has no place for lines: by its callback, or since even tasks that went well are left out."""
    return callback.rpartition(".")[2] in QUIET or not ok_hosts


class Teller:
    """The lines of one task on one host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.told: dict[str, tuple[str, float]] = {}

    def lines(self, progress: t.Mapping[str, t.Mapping[str, t.Any]], now: float) -> list[str]:
        """What is new, or has stood for long. ``now`` in seconds of any clock."""
        found = []
        for name, one in progress.items():
            says, at = self.told.get(name, ("", 0.0))
            if one["says"] == says and now - at < REPEAT:
                continue
            self.told[name] = (one["says"], now)
            stood = f", for {one['seconds']:.0f} s" if one["seconds"] >= WORTH_A_TIME else ""
            found.append(_plain(f"{self.host}{name and ' '}{name}: {one['says']}{stood}"))
        return found


def _plain(text: str) -> str:
    """One line that moves no cursor and changes no colour, whatever an engine has written."""
    return "".join(one for one in " ".join(text.split()) if one.isprintable())
