# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observations for truth tables, each described by what differs from an engine that serves."""

from __future__ import annotations

import time

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import Metrics
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.gate import GateState
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.lease import Lease, SleepRecord
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.observe import ApiState, Observation, derive
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.unit import UnitState

OURS = "ours"


def unit_state(active="active", sub="running", result="success", pids=(10, 11), main_pid=10):
    return UnitState(
        load_state="loaded",
        active_state=active,
        sub_state=sub,
        result=result,
        n_restarts=0,
        main_pid=main_pid if active == "active" else 0,
        control_group="/system.slice/vllm-engine@chat.service",
        started_at=100.0,
        need_daemon_reload=False,
        enabled="enabled",
        job="",
        pids=list(pids) if active == "active" else [],
    )


def metrics(running=0, waiting=0, sleep="awake"):
    states = {str(index): state for index, state in enumerate([sleep] if isinstance(sleep, str) else sleep or [])}
    return Metrics(
        running=None if running is None else {"0": running},
        waiting=None if waiting is None else {"0": waiting},
        sleep_state=states or None,
        tokens=0,
    )


def api_state(paused=False, sleeping=None, running=0, waiting=0, sleep="awake", healthy=True, dev_mode=True):
    return ApiState(
        healthy=healthy,
        version="0.32.0",
        dev_mode=dev_mode,
        paused=paused if dev_mode else None,
        sleeping=(paused if sleeping is None else sleeping) if dev_mode else None,
        metrics=metrics(running, waiting, sleep if dev_mode else None),
        models=["tiny"],
    )


def gate_state(admission="open", proved=True, up=True, sessions=0, told=""):
    """``told`` is of a balancer that does something else than it was told."""
    differs = f"HAProxy has it {admission}, though it was told {told}" if told else ""
    return GateState(
        admission=admission, proved=proved, backend_up=up, sessions=sessions, total=7, told=told, differs=differs
    )


def lease(owner=OURS, purpose="restarted", restore="open", run="r1"):
    """One that holds for as long as the tests run: tables of cases are made when they are collected."""
    now = time.time()
    return Lease(
        owner=owner, reason="", run=run, purpose=purpose, restore=restore, since=now - 10, expires=now + 86400, steps=[]
    )


def sleep_record(level=2, awake=(), kv_only=False, proved=True):
    return SleepRecord(main_pid=10, level=level, kv_only=kv_only, awake=list(awake), proved=proved)


def observation(
    unit=...,
    api=...,
    gate=...,
    held=None,
    has_gate=True,
    last=None,
    sleep=None,
    unseen=None,
    backend="gate",
    group="",
    headless=False,
):
    """An Observation whose state is derived from its signals, as in the product."""
    unit = unit_state() if unit is ... else unit
    gate = gate_state() if gate is ... else gate
    if headless:
        group, has_gate, api = group or "large", False, None
    if not has_gate:
        gate = None
    if api is ...:
        api = api_state() if unit is not None and unit.active_state == "active" else None
    unseen = dict(unseen or {})
    state, level, reasons = derive(unit, api, gate, sleep, has_gate=has_gate, unseen=unseen, headless=headless)
    return Observation(
        engine="chat",
        host="e1",
        state=state,
        level=level,
        reasons=reasons,
        unseen=unseen,
        unit=unit,
        api=api,
        gate=gate,
        has_gate=has_gate,
        gpus=None,
        memory=None,
        lease=held,
        started=None,
        last=last,
        sleep=sleep,
        runtime_version="0.32.0",
        stale=None,
        admission_backend=backend if has_gate else "none",
        group=group,
        headless=headless,
    )
