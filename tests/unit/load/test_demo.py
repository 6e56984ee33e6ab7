# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from demo import failures, summary, table


def load(**changes):
    counts = {"requests": 500, "ok": 500, "cut": 0, "lost": 0, **changes.pop("counts", {})}
    flight = {"min": 8, "mean": 8.0, "below_s": 0.0}
    return {
        "counts": counts,
        "concurrency": flight,
        "reasons": {},
        "longest_gap_s": {"max": 0.3},
        "change_s": 90.0,
    } | changes


def host(name, **changes):
    times = {"out_of_rotation_s": 28.3, "drain_s": 4.8, "stop_s": 4.1, "boot_s": 17.1, "warm_s": 0.5, "overhead_s": 1.8}
    return {"name": name, "engine": "chat", "changed": True, **times, **changes}


HOSTS = [host("e1"), host("e2"), host("e3")]
NAIVE = load(counts={"lost": 90, "cut": 2})


@pytest.mark.parametrize(
    ("hosts", "ours", "naive", "complaint"),
    [
        (HOSTS, load(), NAIVE, None),
        (HOSTS, load(counts={"lost": 1}), NAIVE, "lost 1"),
        (HOSTS, load(counts={"cut": 1}), NAIVE, "cut 1"),
        (HOSTS, load(counts={"requests": 199}), NAIVE, "199 requests"),
        (HOSTS, load(concurrency={"min": 7}), NAIVE, "only 7 of 8"),
        (HOSTS, load(), load(), "proves nothing"),
        (HOSTS, load(), load(counts={"cut": 1}), None),
        (HOSTS, load(), load(counts={"lost": 1}), None),
        (HOSTS[:2], load(), NAIVE, "of 3 hosts our roll restarted e1, e2"),
        ([*HOSTS[:2], host("e3", changed=False)], load(), NAIVE, "restarted e1, e2"),
        ([], load(), NAIVE, "restarted none"),
        ([*HOSTS[:2], host("e3", overhead_s=2.9)], load(), NAIVE, "e3 was out of rotation for 2.9 s"),
        ([*HOSTS[:2], host("e3", overhead_s=2.8)], load(), NAIVE, None),
    ],
)
def test_failures(hosts, ours, naive, complaint):
    found = failures(hosts, ours, naive)
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def test_all_failures_are_named():
    assert len(failures([], load(counts={"lost": 1, "requests": 3}, concurrency={"min": 0}), load())) == 5


def test_summary_and_table():
    assert summary(NAIVE) == {"requests": 500, "lost": 90, "cut": 2, "wall_s": 90.0}
    lines = table(HOSTS, ours=load(longest_gap_s={"max": None}), naive=NAIVE).splitlines()
    assert lines[1].split() == ["ours", "500", "0", "0", "90.0", "s", ">=", "8", "-"]
    assert lines[2].split() == ["naive", "500", "90", "2", "90.0", "s", ">=", "8", "0.3", "s"]
    assert [line.split()[0] for line in lines[5:]] == ["e1", "e2", "e3"]
    assert lines[4].index("overhead") + len("overhead") == len(lines[5])
