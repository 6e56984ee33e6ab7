"""The stand-in for systemctl: the states and properties that the collection reads from the real one."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from ansible_collections.baremetal.vllm.tests.sim.harness import HERE, sim_systemd

UNIT = "vllm-engine@chat.service"


@pytest.fixture
def systemd(tmp_path):
    with sim_systemd(tmp_path) as systemd:
        yield systemd


def until(probe, timeout: float = 15.0) -> None:
    deadline = time.monotonic() + timeout
    while not probe():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_the_commands_run_in_order_with_what_systemd_gives_them(systemd, tmp_path):
    trace = tmp_path / "trace"
    say = f"sh -c 'echo {{}} $MAINPID $SERVICE_RESULT >> {trace}'"
    systemd.add(
        "vllm-engine@.service",
        ExecStartPre=f"+sh -c 'echo pre %i >> {trace}'",
        ExecStart="sleep 1000",
        ExecStartPost=say.format("post"),
        ExecStop=[say.format("stop")],
        ExecStopPost=say.format("stop-post"),
    )
    assert systemd.ctl("start", UNIT).returncode == 0
    state = systemd.show(UNIT)
    pid = state["MainPID"]
    assert (state["ActiveState"], state["SubState"], state["Result"]) == ("active", "running", "success")
    assert state["ControlGroup"] == f"/system.slice/{UNIT}"
    assert systemd.procs(UNIT) == [int(pid)]
    assert 0 < int(state["ExecMainStartTimestampMonotonic"]) <= int(state["ActiveEnterTimestampMonotonic"])
    assert systemd.ctl("stop", UNIT).returncode == 0
    state = systemd.show(UNIT)
    assert (state["ActiveState"], state["SubState"], state["MainPID"]) == ("inactive", "dead", "0")
    assert trace.read_text().splitlines() == ["pre chat", f"post {pid}", f"stop {pid}", "stop-post success"]


def test_show_prints_what_was_asked_for(systemd):
    systemd.add(UNIT, ExecStart="sleep 1000", MemoryMax="1073741824")
    answer = systemd.ctl("show", "-p", "ActiveState,MemoryMax", "--property=Job", UNIT)
    assert sorted(answer.stdout.split()) == ["ActiveState=inactive", "Job=", "MemoryMax=1073741824"]
    apart = systemd.ctl("show", "--property", "ActiveState,MemoryMax,Job", "--", UNIT)
    assert apart.stdout == answer.stdout
    assert systemd.ctl("show", "--value", "-p", "LoadState", "no-such.service").stdout.strip() == "not-found"
    assert systemd.ctl("start", "no-such.service").returncode == 5


def test_a_quick_answer_is_the_slow_one(systemd):
    """The form that the library uses is answered without Python, and never from what is out of date."""
    wanted = "Id,ActiveState,SubState,Job,MainPID,ControlGroup,LoadState,UnitFileState,Result,NRestarts"

    def shown() -> str:
        quick = systemd.ctl("show", "--property", wanted, "--", UNIT).stdout
        assert quick == systemd.ctl("show", f"--property={wanted}", UNIT).stdout
        return quick

    systemd.add(UNIT, ExecStart="sleep 1000")
    assert "ActiveState=inactive\n" in shown()
    systemd.ctl("start", UNIT)
    assert "ActiveState=active\n" in shown()
    systemd.override(UNIT, ActiveState="activating")
    assert "ActiveState=activating\n" in shown()
    systemd.override(UNIT)
    systemd.ctl("disable", UNIT)
    assert "UnitFileState=disabled\n" in shown()
    systemd.ctl("stop", UNIT)
    assert "ActiveState=inactive\n" in shown()
    (systemd.units / f"{UNIT}.json").unlink()
    assert "LoadState=not-found\n" in shown()


def test_a_unit_that_fails_to_start(systemd):
    systemd.add(UNIT, ExecStartPre="sh -c 'echo why it failed; exit 5'", ExecStart="sleep 1000")
    answer = systemd.ctl("start", UNIT)
    assert answer.returncode == 1
    assert "Job for" in answer.stderr
    state = systemd.show(UNIT)
    assert (state["ActiveState"], state["Result"]) == ("failed", "exit-code")
    assert systemd.ctl("is-active", UNIT).returncode == 3
    systemd.ctl("reset-failed", UNIT)
    assert systemd.show(UNIT)["ActiveState"] == "inactive"


def test_a_unit_that_is_neither_enabled_nor_running_is_not_loaded(systemd):
    systemd.add(UNIT, ExecStart="sleep 1000")
    assert systemd.ctl("reset-failed", UNIT).returncode == 0
    systemd.ctl("disable", UNIT)
    answer = systemd.ctl("reset-failed", UNIT)
    assert answer.returncode == 1
    assert answer.stderr.strip() == f"Failed to reset failed state of unit {UNIT}: Unit {UNIT} not loaded."


def test_a_main_process_that_dies_is_restarted_up_to_the_limit(systemd):
    systemd.add(UNIT, ExecStart="sh -c 'exit 1'", Restart="on-failure", RestartSec=0, StartLimitBurst=3)
    systemd.ctl("start", "--no-block", UNIT)
    until(lambda: systemd.show(UNIT)["ActiveState"] == "failed")
    state = systemd.show(UNIT)
    assert (state["NRestarts"], state["Result"]) == ("2", "start-limit-hit")


def test_a_readiness_loop_is_not_ended_when_the_main_process_dies(systemd):
    systemd.add(UNIT, ExecStart="sh -c 'exit 1'", ExecStartPost="sleep 1000")
    systemd.ctl("start", "--no-block", UNIT)
    until(lambda: systemd.show(UNIT)["SubState"] == "start-post")
    time.sleep(0.3)
    assert systemd.show(UNIT)["ActiveState"] == "activating"
    systemd.ctl("stop", UNIT)
    assert systemd.show(UNIT)["ActiveState"] in ("inactive", "failed")


def test_a_stop_that_takes_too_long_ends_in_sigkill_and_says_timeout(systemd):
    systemd.add(UNIT, ExecStart="sh -c 'trap \"\" TERM; while :; do sleep 0.1; done'", TimeoutStopSec=0.3)
    systemd.ctl("start", UNIT)
    systemd.ctl("stop", UNIT)
    state = systemd.show(UNIT)
    assert (state["ActiveState"], state["Result"]) == ("failed", "timeout")


def test_orphans_belong_to_the_control_group_and_die_with_the_unit(systemd, tmp_path):
    engine = f"{sys.executable} -I -S {HERE / 'engine.py'} --uds {tmp_path}/e.sock --state {tmp_path}/state"
    systemd.add(UNIT, ExecStart=engine, KillMode="mixed")
    systemd.ctl("start", UNIT)
    until(lambda: len(systemd.procs(UNIT)) == 2)
    main = int(systemd.show(UNIT)["MainPID"])
    (core,) = set(systemd.procs(UNIT)) - {main}
    os.kill(main, signal.SIGKILL)
    until(lambda: systemd.show(UNIT)["ActiveState"] == "failed")
    assert systemd.show(UNIT)["Result"] == "signal"
    until(lambda: not os.path.exists(f"/proc/{core}"))


def test_overrides_and_failing_calls(systemd):
    systemd.add(UNIT, ExecStart="sleep 1000")
    systemd.override(UNIT, ActiveState="activating", NRestarts="7")
    assert systemd.show(UNIT)["NRestarts"] == "7"
    systemd.override(UNIT, fail="Failed to connect to bus: No such file or directory")
    assert systemd.ctl("show", UNIT).returncode == 1
    systemd.override(UNIT)
    assert systemd.ctl("show", UNIT).returncode == 0


def test_lists_units_and_kills(systemd):
    systemd.add(UNIT, ExecStart="sleep 1000", Description="chat")
    systemd.ctl("start", UNIT)
    assert (
        systemd.ctl("list-units", "--plain", "--no-legend", "vllm-*").stdout == f"{UNIT} loaded active running chat\n"
    )
    systemd.ctl("kill", "--signal=SIGKILL", "--kill-whom=main", UNIT)
    until(lambda: systemd.show(UNIT)["ActiveState"] == "failed")
    assert systemd.show(UNIT)["ExecMainStatus"] == "9"


def test_the_journal_is_what_the_commands_printed(systemd):
    systemd.add(UNIT, ExecStartPre="echo first", ExecStart="sh -c 'echo last; exec sleep 1000'")
    systemd.ctl("start", UNIT)
    until(lambda: "last" in systemd.journal(UNIT))
    assert systemd.journal(UNIT, lines=1) == "last"
