# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The calendar of playbooks/schedule.yml. Pure: what it says depends on its text and on the time that is given.

A window belongs to the day on which it begins, and goes over midnight when its end is not after its begin. Its times
are those of the wall clock. Each has one instant a day: the first at which the clock shows it, or at which the clock
has been put past it. So windows that follow each other on the clock do so in time as well, also when clocks change.
"""

from __future__ import annotations

import re
import typing as t
from datetime import date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from ansible.errors import AnsibleFilterError

from ansible_collections.baremetal.vllm.plugins.filter.switching import sharing

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
KEYS = ("name", "from", "to", "days", "timezone", "awake", "asleep", "level")
CLOCK = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
MIDNIGHT = 24 * 60
# Clocks of all zones have changed at least once each way in that many days.
HORIZON = 370


class Window(t.NamedTuple):
    """``begin`` and ``end`` are minutes after the midnight of its day, ``end`` up to two days later."""

    name: str
    begin: int
    end: int
    days: frozenset[int]
    zone: ZoneInfo
    awake: tuple[str, ...]
    asleep: tuple[str, ...]
    level: int

    @property
    def engines(self) -> frozenset[str]:
        return frozenset(self.awake + self.asleep)


class Span(t.NamedTuple):
    """One time that a window is open, in UTC; ``end`` is not part of it."""

    begin: datetime
    end: datetime
    window: Window


def vllm_calendar(schedule: t.Any, now: t.Any) -> dict[str, t.Any]:
    """What the calendar says at that time: engines to be awake, engines to be asleep and their levels, until when.

    ``until`` is the next time at which any window opens or closes, "" where none does within eight days. Engines that
    no open window names are in neither list.
    """
    windows, wrong = _read(schedule)
    if wrong:
        raise AnsibleFilterError("vllm_schedule: " + "; ".join(wrong) + " (runbook: calendar)")
    at = _moment(now)
    spans = [span for window in windows for span in _spans(window, at, 9)]
    opened = sorted((span for span in spans if span.begin <= at < span.end), key=lambda span: span.window.name)
    turns = [turn for span in spans for turn in (span.begin, span.end) if turn > at]
    return {
        "at": _text(at),
        "until": _text(min(turns)) if turns else "",
        "windows": [span.window.name for span in opened],
        "awake": sorted({name for span in opened for name in span.window.awake}),
        "asleep": {name: span.window.level for span in opened for name in span.window.asleep},
    }


def vllm_calendar_faults(
    schedule: t.Any, now: t.Any, instances: t.Sequence[t.Mapping[str, t.Any]], group: t.Any = ()
) -> list[str]:
    """What is wrong with a host's calendar, in sentences. Windows are laid over each other for more than a year.

    ``instances`` is the host's vllm_engine_instances, ``group`` its vllm_switch_group.
    """
    try:
        at = _moment(now)
    except AnsibleFilterError as exc:
        return [str(exc)]
    windows, wrong = _read(schedule)
    known = [str(one.get("name")) for one in instances]
    others = sharing(instances, group)
    for window in windows:
        strange = sorted(window.engines.difference(known))
        if strange:
            wrong.append(f"window '{window.name}' names {', '.join(strange)}; engines of this host: {', '.join(known)}")
        if pair := _rivals(window.awake, window.awake, others):
            wrong.append(f"window '{window.name}' wants {' and '.join(pair)} awake, which share a GPU")
    for index, window in enumerate(windows):
        for other in windows[index + 1 :]:
            common = sorted(window.engines & other.engines) or _rivals(window.awake, other.awake, others)
            if common and (when := _overlap(window, other, at)):
                wrong.append(
                    f"windows '{window.name}' and '{other.name}' are both open at {_text(when)}, and both speak of "
                    f"{' and '.join(common)}"
                )
    return wrong


def _rivals(
    some: t.Iterable[str], more: t.Iterable[str], others: t.Mapping[str, t.Collection[str] | None]
) -> list[str]:
    """Two engines that share a GPU, one of each; empty where there are none."""
    return next(([one, two] for one in sorted(some) for two in sorted(more) if two in (others.get(one) or ())), [])


def _read(schedule: t.Any) -> tuple[list[Window], list[str]]:
    """The windows that can be read, and what is wrong with the others."""
    if not isinstance(schedule, (list, tuple)):
        return [], ["the schedule is no list"]
    windows: list[Window] = []
    wrong: list[str] = []
    for number, entry in enumerate(schedule, 1):
        if not isinstance(entry, t.Mapping):
            wrong.append(f"entry {number} is no mapping")
            continue
        name = str(entry.get("name") or f"number {number}")
        window, faults = _window(name, entry)
        if name in [one.name for one in windows]:
            faults.append("has the name of another one")
        wrong += [f"window '{name}' {fault}" for fault in faults]
        if window is not None:
            windows.append(window)
    return windows, wrong


def _window(name: str, entry: t.Mapping[str, t.Any]) -> tuple[Window | None, list[str]]:
    wrong = [f"has the unknown key {key}; keys are {', '.join(KEYS)}" for key in entry if key not in KEYS]
    wrong += [] if entry.get("name") else ["has no name"]
    clock = {}
    for key, last in (("from", "23:59"), ("to", "24:00")):
        minutes = _minutes(entry.get(key), last)
        if minutes is None:
            wrong.append(f'has {key} {entry.get(key)!r}; write a time from "00:00" to "{last}", in quotes')
        clock[key] = minutes or 0
    days = _list(entry.get("days", list(DAYS)))
    if not days or [day for day in days if day not in DAYS]:
        wrong.append(f"has days {entry.get('days')!r}; days are {', '.join(DAYS)}")
    zone, fault = _zone(entry.get("timezone", "UTC"))
    wrong += fault
    awake, asleep = _list(entry.get("awake", [])), _list(entry.get("asleep", []))
    if awake is None or asleep is None:
        wrong.append("has awake or asleep that is no list of engines")
    elif not awake + asleep:
        wrong.append("names no engine in awake or asleep")
    elif both := sorted(set(awake) & set(asleep)):
        wrong.append(f"wants {', '.join(both)} awake and asleep")
    level = entry.get("level", 1)
    if str(level) not in ("1", "2"):
        wrong.append(f"has level {level!r}; only 1 and 2 free the memory of an engine")
    if wrong:
        return None, wrong
    begin, end = clock["from"], clock["to"]
    return (
        Window(
            name,
            begin,
            end if end > begin else end + MIDNIGHT,
            frozenset(DAYS.index(day) for day in days or ()),
            t.cast(ZoneInfo, zone),
            tuple(awake or ()),
            tuple(asleep or ()),
            int(level),
        ),
        [],
    )


def _minutes(value: t.Any, last: str) -> int | None:
    """Unquoted, 22:00 is the number 1320 to YAML, and 06:00 a text: only texts are read, so that none is guessed."""
    if value == last == "24:00":
        return MIDNIGHT
    found = CLOCK.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) * 60 + int(found[2]) if found else None


def _list(value: t.Any) -> list[str] | None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        return None
    return [str(item) for item in value]


def _zone(name: t.Any) -> tuple[ZoneInfo | None, list[str]]:
    try:
        return ZoneInfo(str(name)), []
    except (KeyError, ValueError, OSError):  # the last for a directory of the data base, such as Europe
        fault = (
            f"has timezone {name!r}, which this controller does not know; write it as in Europe/Berlin, and install "
            "tzdata (the package of the system or of Python) where it is missing"
        )
        return None, [fault]


def _moment(now: t.Any) -> datetime:
    value = now
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", value.strip()))
        except ValueError:
            value = None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise AnsibleFilterError(
            f"{now!r} is no time with an offset, such as 2026-03-29T02:30:00+01:00 (runbook: calendar)"
        )
    return value.astimezone(timezone.utc)


def _text(value: datetime) -> str:
    return value.strftime("%Y-%m-%dT%H:%M:%SZ")


def _instant(day: date, minutes: int, zone: ZoneInfo) -> datetime:
    """When the wall clock first shows that many minutes after the midnight of that day, or has been put past it."""
    shown = datetime(day.year, day.month, day.day) + timedelta(minutes=minutes)
    early = shown.replace(tzinfo=zone, fold=0).astimezone(timezone.utc)
    if early.astimezone(zone).replace(tzinfo=None) == shown:
        return early
    # The clock is never there: it jumps between these two, by which the shown time differs from the time before it.
    before, after = shown.replace(tzinfo=zone, fold=1).astimezone(timezone.utc), early
    old = before.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = before + (after - before) / 2
        before, after = (middle, after) if middle.astimezone(zone).utcoffset() == old else (before, middle)
    return after.replace(microsecond=0)


def _spans(window: Window, around: datetime, days: int) -> list[Span]:
    """Those that begin from three days before to ``days`` days after a time, in order."""
    today = around.astimezone(window.zone).date()
    found = []
    for offset in range(-3, days + 1):
        day = today + timedelta(days=offset)
        if day.weekday() in window.days:
            begin, end = (_instant(day, minutes, window.zone) for minutes in (window.begin, window.end))
            if begin < end:  # else the clock has jumped over all of it
                found.append(Span(begin, end, window))
    return found


def _overlap(one: Window, two: Window, at: datetime) -> datetime | None:
    """The first time from a few days before ``at`` on at which both are open."""
    spans = sorted(_spans(one, at, HORIZON) + _spans(two, at, HORIZON), key=lambda span: span.begin)
    for earlier, later in zip(spans, spans[1:]):
        # The spans of one window never overlap: none is longer than a day.
        if later.begin < earlier.end:
            return later.begin
    return None


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"vllm_calendar": vllm_calendar, "vllm_calendar_faults": vllm_calendar_faults}
