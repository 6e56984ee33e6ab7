# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The calendar's arithmetic: boundaries, midnight, clocks that change, and what is refused."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.baremetal.vllm.plugins.filter.schedule import vllm_calendar, vllm_calendar_faults

CHAT, CODE = {"name": "chat", "gpus": ["0"]}, {"name": "code", "gpus": ["0"]}
EMBED = {"name": "embed", "gpus": ["1"]}
ENGINES = [CHAT, CODE, EMBED]
BERLIN, NEW_YORK, KOLKATA = "Europe/Berlin", "America/New_York", "Asia/Kolkata"
DAY = {"name": "day", "from": "08:00", "to": "20:00", "awake": ["chat"], "asleep": ["code"]}
NIGHT = {"name": "night", "from": "20:00", "to": "08:00", "awake": ["code"], "asleep": ["chat"], "level": 2}
NOW = "2026-01-01T00:00:00Z"


def window(**changes):
    return {"name": "w", "from": "08:00", "to": "20:00", "awake": ["chat"], "timezone": BERLIN, **changes}


def names(schedule, now):
    return vllm_calendar(schedule, now)["windows"]


@pytest.mark.parametrize(
    ("now", "opened", "until"),
    [
        ("2026-06-10T07:59:59Z", "night", "2026-06-10T08:00:00Z"),
        ("2026-06-10T08:00:00Z", "day", "2026-06-10T20:00:00Z"),
        ("2026-06-10T19:59:59Z", "day", "2026-06-10T20:00:00Z"),
        ("2026-06-10T20:00:00Z", "night", "2026-06-11T08:00:00Z"),
        ("2026-06-11T00:00:00Z", "night", "2026-06-11T08:00:00Z"),
        ("2026-06-10T22:00:00+02:00", "night", "2026-06-11T08:00:00Z"),
        ("2026-06-10 10:00:00+02:00", "day", "2026-06-10T20:00:00Z"),
    ],
)
def test_a_window_begins_with_its_first_second_and_ends_before_its_last(now, opened, until):
    found = vllm_calendar([DAY, NIGHT], now)
    assert (found["windows"], found["until"]) == ([opened], until)
    if opened == "day":
        assert (found["awake"], found["asleep"]) == (["chat"], {"code": 1})
    else:
        assert (found["awake"], found["asleep"]) == (["code"], {"chat": 2})


@pytest.mark.parametrize(
    ("changes", "now", "opened"),
    [
        # a window belongs to the day on which it begins: Friday night is Friday's until Saturday morning
        ({"from": "22:00", "to": "06:00", "days": ["fri"]}, "2026-06-12T21:59:00+02:00", False),
        ({"from": "22:00", "to": "06:00", "days": ["fri"]}, "2026-06-12T22:00:00+02:00", True),
        ({"from": "22:00", "to": "06:00", "days": ["fri"]}, "2026-06-13T05:59:00+02:00", True),
        ({"from": "22:00", "to": "06:00", "days": ["fri"]}, "2026-06-13T06:00:00+02:00", False),
        ({"from": "22:00", "to": "06:00", "days": ["fri"]}, "2026-06-13T22:00:00+02:00", False),
        ({"from": "22:00", "to": "06:00", "days": ["fri"]}, "2026-06-12T05:00:00+02:00", False),
        # Sunday's reaches into Monday
        ({"from": "22:00", "to": "06:00", "days": ["sun"]}, "2026-06-15T05:00:00+02:00", True),
        # the days are those of the window's own time zone
        ({"from": "00:30", "to": "01:00", "days": ["sat"]}, "2026-06-12T22:45:00Z", True),
        ({"from": "00:30", "to": "01:00", "days": ["fri"]}, "2026-06-12T22:45:00Z", False),
        ({"from": "20:00", "to": "21:00", "days": ["fri"], "timezone": NEW_YORK}, "2026-06-13T00:30:00Z", True),
        ({"from": "05:30", "to": "06:00", "timezone": KOLKATA}, "2026-06-13T00:00:00Z", True),
        ({"from": "05:30", "to": "06:00", "timezone": KOLKATA}, "2026-06-13T00:30:00Z", False),
        # a whole day, written in three ways
        ({"from": "00:00", "to": "24:00", "days": ["sat"]}, "2026-06-13T23:59:59+02:00", True),
        ({"from": "00:00", "to": "24:00", "days": ["sat"]}, "2026-06-14T00:00:00+02:00", False),
        ({"from": "00:00", "to": "00:00", "days": ["sat"]}, "2026-06-13T23:59:59+02:00", True),
        ({"from": "08:00", "to": "08:00", "days": ["sat"]}, "2026-06-14T07:59:59+02:00", True),
        ({"from": "08:00", "to": "08:00", "days": ["sat"]}, "2026-06-14T08:00:00+02:00", False),
        # and from a time to midnight
        ({"from": "23:00", "to": "24:00", "days": ["sat"]}, "2026-06-13T23:30:00+02:00", True),
        ({"from": "23:00", "to": "24:00", "days": ["sat"]}, "2026-06-14T00:00:00+02:00", False),
        # over the end of a year
        ({"from": "22:00", "to": "06:00", "days": ["thu"]}, "2027-01-01T03:00:00+01:00", True),
    ],
)
def test_days_and_midnight(changes, now, opened):
    assert names([window(**changes)], now) == (["w"] if opened else [])


# Berlin: at 2026-03-29T01:00:00Z clocks go from 02:00 to 03:00; at 2026-10-25T01:00:00Z from 03:00 to 02:00.
@pytest.mark.parametrize(
    ("begin", "end", "first", "last"),
    [
        # what the clock never shows is when it jumps
        ("02:30", "04:00", "2026-03-29T01:00:00Z", "2026-03-29T01:59:59Z"),
        ("01:00", "02:30", "2026-03-29T00:00:00Z", "2026-03-29T00:59:59Z"),
        ("22:00", "02:30", "2026-03-28T21:00:00Z", "2026-03-29T00:59:59Z"),
        # a night of one hour less, and of one hour more
        ("22:00", "06:00", "2026-03-28T21:00:00Z", "2026-03-29T03:59:59Z"),
        ("22:00", "06:00", "2026-10-24T20:00:00Z", "2026-10-25T04:59:59Z"),
        # what it shows twice is the first time
        ("02:30", "04:00", "2026-10-25T00:30:00Z", "2026-10-25T02:59:59Z"),
        ("01:00", "02:30", "2026-10-24T23:00:00Z", "2026-10-25T00:29:59Z"),
        # and what begins after the hour that comes twice begins after its second time
        ("03:00", "04:00", "2026-10-25T02:00:00Z", "2026-10-25T02:59:59Z"),
    ],
)
def test_when_clocks_change(begin, end, first, last):
    schedule = [window(**{"from": begin, "to": end})]
    second = timedelta(seconds=1)
    inside = [datetime.fromisoformat(time.replace("Z", "+00:00")) for time in (first, last)]
    assert [names(schedule, time) for time in inside] == [["w"], ["w"]]
    assert [names(schedule, time) for time in (inside[0] - second, inside[1] + second)] == [[], []]


def test_a_window_that_the_clock_jumps_over_is_never_open():
    schedule = [window(**{"from": "02:10", "to": "02:50"})]
    minute = timedelta(minutes=1)
    begin = datetime(2026, 3, 29, 0, 0, tzinfo=timezone.utc)
    assert not [begin + n * minute for n in range(180) if names(schedule, begin + n * minute)]


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, KOLKATA, "Australia/Lord_Howe", "America/Sao_Paulo", "UTC"])
def test_windows_that_follow_each_other_leave_no_minute_out_and_take_none_twice(zone):
    day, night = {**DAY, "timezone": zone, "to": "02:30"}, {**NIGHT, "timezone": zone, "from": "02:30"}
    at = datetime(2026, 1, 1, tzinfo=timezone.utc)
    for _unused in range(4 * 366):
        assert len(names([day, night], at)) == 1, at
        at += timedelta(hours=5, minutes=59, seconds=57)
    turn = datetime(2026, 3, 29, tzinfo=timezone.utc)
    assert all(len(names([day, night], turn + timedelta(minutes=n))) == 1 for n in range(240))
    assert vllm_calendar_faults([day, night], at, ENGINES) == []


def test_engines_that_no_open_window_names_are_left_alone():
    found = vllm_calendar([window(days=["mon"])], "2026-06-13T10:00:00Z")
    assert (found["windows"], found["awake"], found["asleep"]) == ([], [], {})
    assert found["until"] == "2026-06-15T06:00:00Z"
    assert vllm_calendar([], NOW) == {"at": NOW, "until": "", "windows": [], "awake": [], "asleep": {}}


def test_windows_of_different_engines_are_open_together():
    vectors = {**NIGHT, "name": "vectors", "awake": [], "asleep": ["embed"], "level": 1}
    assert vllm_calendar_faults([DAY, NIGHT, vectors], NOW, ENGINES) == []
    found = vllm_calendar([DAY, NIGHT, vectors], "2026-06-13T23:00:00Z")
    assert found["windows"] == ["night", "vectors"]
    assert found["asleep"] == {"chat": 2, "embed": 1}


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ({"day": DAY}, "the schedule is no list"),
        (["day"], "entry 1 is no mapping"),
        ([{**DAY, "name": ""}], "window 'number 1' has no name"),
        ([DAY, {**NIGHT, "name": "day"}], "window 'day' has the name of another one"),
        ([{**DAY, "at": "08:00"}], "has the unknown key at; keys are name, from, to, days"),
        # YAML reads 20:00 without quotes as a number to the base of 60
        ([{**DAY, "to": 1200}], 'has to 1200; write a time from "00:00" to "24:00", in quotes'),
        ([{**DAY, "from": "8:00"}], "has from '8:00'"),
        ([{**DAY, "from": "24:00"}], 'has from \'24:00\'; write a time from "00:00" to "23:59"'),
        ([{**DAY, "to": "20:60"}], "has to '20:60'"),
        ([{**DAY, "to": None}], "has to None"),
        ([{**DAY, "days": ["monday"]}], "has days ['monday']; days are mon, tue, wed, thu, fri, sat, sun"),
        ([{**DAY, "days": "mon"}], "has days 'mon'"),
        ([{**DAY, "days": []}], "has days []"),
        ([{**DAY, "timezone": "Berlin"}], "has timezone 'Berlin', which this controller does not know"),
        ([{**DAY, "timezone": "Europe"}], "has timezone 'Europe'"),
        ([{**DAY, "timezone": "../etc/passwd"}], "has timezone '../etc/passwd'"),
        ([{**DAY, "timezone": None}], "has timezone None"),
        ([{**DAY, "awake": "chat"}], "has awake or asleep that is no list of engines"),
        ([{**DAY, "awake": [], "asleep": []}], "names no engine in awake or asleep"),
        ([{**DAY, "asleep": ["chat"]}], "wants chat awake and asleep"),
        ([{**DAY, "level": 0}], "has level 0; only 1 and 2 free the memory"),
        ([{**DAY, "level": True}], "has level True"),
        ([{**DAY, "awake": ["chta"]}], "window 'day' names chta; engines of this host: chat, code, embed"),
        ([{**DAY, "awake": ["chat", "code"], "asleep": []}], "wants chat and code awake, which share a GPU"),
        # over each other
        ([DAY, {**NIGHT, "from": "19:59"}], "windows 'day' and 'night' are both open at"),
        ([DAY, {**NIGHT, "to": "08:01"}], "both speak of chat and code"),
        ([DAY, {**DAY, "name": "again"}], "windows 'day' and 'again' are both open"),
        ([DAY, {**NIGHT, "asleep": [], "to": "08:01"}], "both speak of code"),
        ([{**DAY, "asleep": []}, {**NIGHT, "asleep": [], "to": "08:01"}], "both speak of chat and code"),
        ([window(**{"from": "22:00", "to": "06:00", "days": ["fri"]}),
          window(name="x", days=["sat"], **{"from": "05:59"})], "are both open at"),
        # two zones, which are an hour closer to each other for some weeks of a year only
        ([window(**{"from": "13:00", "to": "19:00"}),
          window(name="x", timezone=NEW_YORK, **{"from": "13:00", "to": "14:00"})],
         "windows 'w' and 'x' are both open at 2026-03-08T17:00:00Z"),
    ],
)  # fmt: skip
def test_faults_are_told(schedule, says):
    faults = vllm_calendar_faults(schedule, NOW, ENGINES)
    assert says in "; ".join(faults)
    assert len(faults) == len(set(faults))


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [DAY, NIGHT],
        [{**DAY, "days": ["mon", "tue"]}, {**NIGHT, "name": "rest", "from": "08:00", "to": "20:00", "days": ["wed"]}],
        [window(**{"from": "13:00", "to": "18:00"}), window(name="x", timezone=NEW_YORK, **{"from": "13:00"})],
        [window(level="2", awake=[], asleep=["chat"])],
    ],
)
def test_good_calendars_have_none(schedule):
    assert vllm_calendar_faults(schedule, NOW, ENGINES) == []


def test_a_group_that_is_declared_counts_as_sharing():
    free = [{"name": "chat"}, {"name": "code"}]
    both = [{**DAY, "awake": ["chat", "code"], "asleep": []}]
    assert vllm_calendar_faults(both, NOW, free) == []
    assert "share a GPU" in vllm_calendar_faults(both, NOW, free, ["chat", "code"])[0]


@pytest.mark.parametrize("now", ["2026-06-10T08:00:00", "yesterday", "", None, 1781078400, datetime(2026, 6, 10)])
def test_a_time_without_an_offset_is_refused(now):
    with pytest.raises(AnsibleFilterError, match="is no time with an offset"):
        vllm_calendar([DAY], now)
    assert "is no time with an offset" in vllm_calendar_faults([DAY], now, ENGINES)[0]


def test_a_bad_calendar_is_not_read():
    with pytest.raises(AnsibleFilterError, match="window 'day' has level 0"):
        vllm_calendar([{**DAY, "level": 0}], NOW)
