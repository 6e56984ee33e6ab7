# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which lines of progress are worth showing."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.plugin_utils import _progress


@pytest.mark.parametrize(
    ("wanted", "seconds"),
    [
        (True, 10.0),
        (False, 0.0),
        ("yes", 10.0),
        ("False", 0.0),
        (0, 0.0),
        ("0", 0.0),
        (3, 3.0),
        ("2.5", 2.5),
        (60, 60.0),
    ],
)
def test_what_the_variable_means(wanted, seconds):
    assert _progress.seconds_between(wanted) == seconds


@pytest.mark.parametrize("wanted", ["often", -1, 61, None, [], float("nan"), "inf"])
def test_what_it_cannot_mean(wanted):
    with pytest.raises(ValueError, match="vllm_progress must be true, false or seconds from 0 to 60, not "):
        _progress.seconds_between(wanted)


@pytest.mark.parametrize(
    ("callback", "ok_hosts", "quiet"),
    [
        ("default", True, False),
        ("ansible.builtin.default", True, False),
        ("awx_display", True, False),
        ("community.general.yaml", True, False),
        ("default", False, True),
        ("json", True, True),
        ("ansible.posix.jsonl", True, True),
        ("community.general.null", True, True),
    ],
)
def test_output_without_a_place_for_lines(callback, ok_hosts, quiet):
    assert _progress.is_quiet(callback, ok_hosts) is quiet


def says(text: str, seconds: float = 0.0) -> dict:
    return {"chat": {"says": text, "seconds": seconds}}


def test_what_is_new_is_told_and_what_stands_is_repeated_seldom():
    teller = _progress.Teller("gpu1")
    told = [
        (now, line)
        for now, progress in [
            (0, says("pause the engine")),
            (10, says("pause the engine", 10)),
            (20, says("start it", 0.4)),
            (30, says("start it", 10.4)),
            (49, says("start it", 29.4)),
            (50, says("start it", 30.4)),
            (60, says("starting, loads the model, 60 of 900 s", 3)),
            (61, {}),
            (70, says("starting, loads the model, 60 of 900 s", 13)),
        ]
        for line in teller.lines(progress, now)
    ]
    assert told == [
        (0, "gpu1 chat: pause the engine"),
        (20, "gpu1 chat: start it"),
        (50, "gpu1 chat: start it, for 30 s"),
        (60, "gpu1 chat: starting, loads the model, 60 of 900 s"),
    ]


def test_each_engine_has_its_line_and_a_line_is_one_line():
    progress = {"chat": {"says": "a\r\nb\x1b[31m", "seconds": 12.0}, "code": {"says": "c", "seconds": 1.0}}
    assert _progress.Teller("gpu1 -> gpu2").lines(progress, 0) == [
        "gpu1 -> gpu2 chat: a b[31m, for 12 s",
        "gpu1 -> gpu2 code: c",
    ]
    assert _progress.Teller("gpu1").lines({"": {"says": "no connection", "seconds": 0}}, 0) == ["gpu1: no connection"]
