# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""(wanted, Observation) -> steps. Pure: no I/O, no clock."""

from __future__ import annotations

import typing as t

from .errors import Refused, UnknownState
from .observe import Observation
from .source import ZERO_COPY


class Step(t.NamedTuple):
    """One thing to do. ``says`` completes the sentence of the module's ``actions``, for an engine's ``door``."""

    name: str
    says: str
    mutates: bool = True


LEASE = Step("lease", "take the lease")
WITHDRAW = Step("withdraw", "withdraw it at {door}")
AWAIT_ROUTER = Step("await_router", "wait until the router has seen it", mutates=False)
RESUME = Step("resume", "resume a paused engine")
AWAIT_IDLE = Step("await_idle", "wait for the requests in flight", mutates=False)
CLOSE = Step("close", "close {door} for new requests")
AWAIT_CLOSED = Step("await_closed", "wait for requests that came before {door} closed", mutates=False)
PAUSE = Step("pause", "pause the engine")
STOP = Step("stop", "stop the unit")
START = Step("start", "start the unit and wait until it is proved ready")
COMPARE_SPEED = Step("compare_speed", "compare its speed with that of the configuration before", mutates=False)
PROVE = Step("prove", "prove it by a completion", mutates=False)
ADMIT = Step("admit", "admit it at {door}")
AWAIT_READY = Step("await_ready", "wait until {ready}", mutates=False)
RELEASE = Step("release", "release the lease")
KEEP = Step("keep", "keep the configuration that its head was proved with", mutates=False)

SLEEP = Step("sleep", "put it to sleep")
WAKE = Step("wake", "wake it")
WAKE_WEIGHTS = Step("wake_weights", "wake the memory of its weights")
ROLL_BACK = Step("roll_back", "go back to the configuration that was proved before")
RELOAD = Step("reload", "load its weights anew on every rank")
WAKE_KV = Step("wake_kv", "wake its KV cache")
RESET_CACHE = Step("reset_cache", "reset its prefix cache")
ADAPTERS = Step("adapters", "bring its adapters back and prove them", mutates=False)

WANTED = ("drained", "serving", "started", "stopped", "restarted", "asleep", "awake", "reloaded", "rolled_back")
AWAKE = ("serving", "withdrawn", "draining", "drained")
# What is proved on one host says nothing of the others of a group.
NOT_OF_GROUPS = {"asleep": "put to sleep", "reloaded": "reloaded"}
# The purpose of a lease whose engine should sleep, and had to be stopped to free its memory.
STOPPED_FOR_SLEEP = "stopped for sleep"


class Options(t.NamedTuple):
    """What a caller may choose.

    ``lease_against`` is the owner of someone else's valid lease, if any; ``keep`` freezes requests that a drain's
    time-out finds; ``host_copy_mib`` is what a sleep at level 1 takes of the host, where that is known better than from
    the weights; ``on_failure`` is fail, of a sleep also stop, of a start also rollback; ``digest`` is that of the
    weights to be served; ``on_mismatch`` of a wake is fail or restart; ``tags`` are the parts that a wake brings back,
    () for all; ``compare_speed`` asks whether a start is as fast as the configuration before.
    """

    lease_against: str = ""
    owner: str = ""
    force: bool = False
    run: str = ""
    level: int = 1
    kv_only: bool = False
    deepen: bool = True
    keep: bool = False
    host_copy_mib: int | None = None
    on_failure: str = "fail"
    digest: str = ""
    on_mismatch: str = "fail"
    tags: tuple[str, ...] = ()
    compare_speed: bool = False


def plan(wanted: str, now: Observation, options: Options) -> list[Step]:
    """The steps from what was seen to what is wanted; empty when it is there.

    :raises Refused: the state, or someone else's lease, forbids it.
    :raises UnknownState: nothing is safe but to stop and start.
    """
    if _is_stopping(now) and wanted not in ("stopped", "restarted", "rolled_back"):
        _refuse(now, wanted, "wait until it has stopped and run this again, or use vllm_engine state=restarted")
    if now.group and wanted in NOT_OF_GROUPS:
        raise Refused(
            f"engine '{now.engine}' on {now.host} is {now.state} and of group '{now.group}', which serves one replica "
            f"across hosts: it cannot be {NOT_OF_GROUPS[wanted]} by itself",
            entry="group-alone",
            next_step="change its inventory, run baremetal.vllm.site and renew the group with "
            "baremetal.vllm.rolling_restart; or stop all engines of the group",
        )
    if now.headless:
        steps = _headless(wanted, now, options)
    elif wanted == "serving":
        steps = _serving(now)
    else:
        steps = {
            "drained": _drained,
            "started": _started,
            "stopped": _stopped,
            "restarted": _restarted,
            "asleep": _asleep,
            "awake": _awake,
            "reloaded": _reloaded,
            "rolled_back": _rolled_back,
        }[wanted](now, options)
    _judge_weights(now, wanted, steps)
    if options.compare_speed and wanted in ("started", "restarted") and PROVE in steps:
        steps.insert(steps.index(PROVE), COMPARE_SPEED)
    if steps and options.lease_against and not options.force:
        raise Refused(
            f"engine '{now.engine}' on {now.host} is held by {options.lease_against}",
            entry="lease-held",
            next_step="wait until that lease is released or expires, or use force: true",
            lease=options.lease_against,
        )
    return steps


def _refuse(now: Observation, wanted: str, next_step: str) -> t.NoReturn:
    why = f" ({'; '.join(now.reasons)})" if now.reasons else ""
    error = UnknownState if now.state == "unknown" else Refused
    raise error(
        f"engine '{now.engine}' on {now.host} is {now.state}{why} and cannot be brought to {wanted} from there",
        entry="state-unknown" if now.state == "unknown" else "wrong-state",
        next_step=next_step,
        reasons=now.reasons,
    )


def _judge_weights(now: Observation, wanted: str, steps: list[Step]) -> None:
    """An engine with a preload daemon: what would not start is not stopped, what serves wrong weights is not admitted.

    :raises Refused: names why; nothing was touched.
    """
    if now.preload is None:
        return
    starts = START in steps and now.state != "starting"
    if starts and now.preload.next_start == "refused":
        raise Refused(
            f"engine '{now.engine}' on {now.host} is {now.state} and would not start again: "
            + "; ".join(now.preload.why),
            entry="preload-refused",
            next_step="correct that first; a daemon is changed while its engines are stopped: vllm_engine "
            "state=stopped, vllm_preload, vllm_engine state=started",
            preload={"daemon": now.preload.daemon, "state": now.preload.state, "why": now.preload.why},
        )
    if now.preload.wrong and PROVE in steps and not starts:
        raise Refused(
            f"engine '{now.engine}' on {now.host} is not brought to {wanted}: {now.preload.wrong}",
            entry="weights-mismatch",
            next_step="stop it, bring its daemon and its checkpoint together (vllm_preload), and start it",
        )


def _is_stopping(now: Observation) -> bool:
    """Its unit stops by someone's order: it drains, and answers no more."""
    return now.unit is not None and now.unit.active_state == "deactivating"


def _admission(now: Observation) -> str:
    return now.gate.admission if now.gate else ""


def _again(now: Observation) -> list[Step]:
    """What a balancer has forgotten of an engine that is where it should be otherwise."""
    return [CLOSE] if now.gate is not None and now.gate.forgot else []


def _lease(now: Observation, options: Options, purpose: str) -> list[Step]:
    """Needed unless it is ours already, for this. What was drained on purpose keeps that purpose."""
    held = now.lease
    return [] if held is not None and held.owner == options.owner and held.purpose in (purpose, "drained") else [LEASE]


def _release(now: Observation) -> list[Step]:
    return [RELEASE] if now.lease is not None else []


def _out(now: Observation, wanted: str) -> list[Step]:
    """Out of rotation with nothing in flight: from any awake state."""
    if now.in_flight is None:
        raise Refused(
            f"engine '{now.engine}' on {now.host} does not report its requests in flight, so a drain to {wanted} "
            "could not be proved",
            entry="requests-unreported",
            next_step="remove --disable-log-stats from the engine's options and restart it once by hand",
            unseen=now.unseen,
        )
    steps: list[Step] = []
    if now.paused and (now.in_flight or _admission(now) == "open"):
        steps.append(RESUME)  # what waits in a paused engine would never finish
    if now.has_gate and _admission(now) != "closed":
        steps += [WITHDRAW] if _admission(now) == "open" else []
        # An earlier run may have been killed right after it withdrew: the router's time counts from now.
        steps += [AWAIT_ROUTER, AWAIT_IDLE, CLOSE, AWAIT_CLOSED]
    else:
        steps.append(AWAIT_IDLE)
    return steps


def _closed(now: Observation) -> list[Step]:
    return [CLOSE] if now.has_gate and _admission(now) != "closed" else []


def _is_frozen(now: Observation) -> bool:
    """Out of rotation and paused in the middle of requests, which go on when it is resumed."""
    return now.state == "draining" and bool(now.paused) and _admission(now) != "open"


def _drained(now: Observation, options: Options) -> list[Step]:
    if now.state in ("stopped", "failed", "asleep", "drained"):
        return [*_lease(now, options, "drained"), *_closed(now)]
    if now.state not in AWAKE:
        _refuse(now, "drained", f"wait until it has settled, or stop it with vllm_engine (journalctl -u {_unit(now)})")
    if options.keep and _is_frozen(now):
        return [*_lease(now, options, "drained"), *_closed(now)]
    if options.keep and not (now.api and now.api.dev_mode):
        raise Refused(
            f"engine '{now.engine}' on {now.host} has no development endpoints, so it cannot freeze its requests",
            entry="no-dev-endpoints",
            next_step="use mode wait, or set dev_mode: true for it and restart it",
        )
    if not now.has_gate and not (now.api and now.api.dev_mode):
        raise Refused(
            f"engine '{now.engine}' on {now.host} has neither admission (it is none) nor development endpoints, so "
            "nothing would keep it drained",
            entry="no-dev-endpoints",
            next_step="name its gate or balancer in admission, or set dev_mode: true for it and restart it",
        )
    pause = [PAUSE] if now.api and now.api.dev_mode else []
    return [*_lease(now, options, "drained"), *_out(now, "drained"), *pause]


def _serving(now: Observation) -> list[Step]:
    if now.state == "serving":
        return _release(now)
    if now.state not in AWAKE:
        hints = {
            "stopped": "start it with vllm_engine state=started",
            "failed": f"read journalctl -u {_unit(now)}, then start it with vllm_engine state=started",
            "asleep": "wake it before it may serve",
            "starting": "wait until it is ready and run this again",
            "unknown": "restart it with vllm_engine state=restarted",
        }
        _refuse(now, "serving", hints.get(now.state, "wait until the engine has settled"))
    resume = [RESUME] if now.paused else []
    admit = [ADMIT, AWAIT_READY] if now.has_gate else []
    return [*resume, *_clean(now), PROVE, *_adapters(now), *admit, *_release(now)]


def _headless(wanted: str, now: Observation, options: Options) -> list[Step]:
    """Of an engine without an API server only the unit can be changed. Its head drains and proves for the whole group.

    So the lease of such a change stays until ``serving``, which whoever has proved the head asks for; with it, what the
    process was started with counts as proved.
    """
    runs = now.state == "headless"
    if wanted == "serving":
        if not runs:
            _refuse(now, wanted, "restart its group with baremetal.vllm.rolling_restart")
        return [*([KEEP] if now.unkept else []), *_release(now)]
    if wanted in ("drained", "awake"):
        return []
    lease = _lease(now, options, wanted)
    if wanted == "stopped":
        return [] if now.state == "stopped" else [*lease, STOP]
    if wanted == "started":
        if now.state == "unknown":
            _refuse(now, wanted, "restart it with vllm_engine state=restarted")
        if now.state == "starting":
            return [START]
        return [] if runs else [*lease, START]
    down = [] if now.state == "stopped" else [STOP]
    if wanted == "rolled_back":
        put = _put_back(now, options)
        return [] if runs and not put and now.stale is False else [*lease, *down, *put, START]
    if runs and options.run and now.restarted_by == options.run:
        return []
    return [*lease, *down, START]


def _started(now: Observation, options: Options) -> list[Step]:
    if now.state in ("stopped", "failed"):
        return [*_lease(now, options, "started"), START, *_back(now)]
    if now.state == "starting":
        return [START, *_finish(now, options)]
    if now.state == "unknown":
        _refuse(now, "started", "restart it with vllm_engine state=restarted")
    return _finish(now, options) if now.state in AWAKE else []


def _stopped(now: Observation, options: Options) -> list[Step]:
    if now.state == "stopped":
        again = _again(now)
        return [*_lease(now, options, "stopped"), *again] if again else []
    return [*_lease(now, options, "stopped"), *_down(now, options)]


def _restarted(now: Observation, options: Options) -> list[Step]:
    if options.run and now.state in AWAKE and not _is_stopping(now) and now.restarted_by == options.run:
        return _finish(now, options)
    down = [] if now.state == "stopped" else _down(now, options)
    return [*_lease(now, options, "restarted"), *down, START, *_back(now)]


def _rolled_back(now: Observation, options: Options) -> list[Step]:
    """To the last proved configuration that is another than the one on disk, once for each run."""
    put = _put_back(now, options)
    if not put and now.state in AWAKE and now.stale is False:
        return _finish(now, options)
    down = [] if now.state == "stopped" else _down(now, options)
    return [*_lease(now, options, "rolled_back"), *down, *put, START, *_back(now)]


def _put_back(now: Observation, options: Options) -> list[Step]:
    """Nothing where this run has put the files in place; whether a process runs with them is another matter."""
    back = now.went_back or {}
    if options.run and back.get("run") == options.run and back.get("config_digest") == now.config_digest:
        return []
    if now.goes_back is None:
        raise Refused(
            f"engine '{now.engine}' on {now.host} has no other configuration that was ever proved, so there is nothing "
            "to go back to",
            entry="nothing-to-go-back-to",
            next_step="correct the inventory and run baremetal.vllm.site",
        )
    return [ROLL_BACK]


def _asleep(now: Observation, options: Options) -> list[Step]:
    level = 0 if options.kv_only else options.level
    if options.keep and (level or options.kv_only):
        raise Refused(
            f"engine '{now.engine}' on {now.host} cannot keep requests over this sleep: it gives up the KV cache that "
            "they need",
            entry="sleep-refused",
            next_step="use level 0 to keep them, or mode wait or abort",
        )
    if level or options.kv_only:
        _may_sleep(now, level)
    if now.state in ("asleep", "waking"):
        kv_only = now.sleep is not None and now.sleep.kv_only
        there = now.state == "asleep" and now.level == level and (level != 0 or kv_only == options.kv_only)
        if there and (now.sleep is None or now.sleep.proved):
            return [*_lease(now, options, "asleep"), *_again(now)]
        if not there and not options.deepen:
            _refuse(now, f"sleep at level {level} (it sleeps at {now.level})", "wake it first, or allow deepen")
        # A second /sleep would answer 200 and do nothing: awake first, without serving in between. So also where a
        # run was killed in the middle, or found that the sleep had freed nothing.
        _room_for_copy(now, level, options)
        return [*_lease(now, options, "asleep"), *_rouse(now), SLEEP]
    if options.on_failure == "stop" and now.state == "stopped" and _purpose(now, options) == STOPPED_FOR_SLEEP:
        return []  # its memory is free, which is what that policy promises
    if now.state not in AWAKE:
        _refuse(
            now, "asleep", f"wait until it has settled, or restart it with vllm_engine (journalctl -u {_unit(now)})"
        )
    if not now.api or not now.api.dev_mode:
        raise Refused(
            f"engine '{now.engine}' on {now.host} has no development endpoints, so it cannot sleep",
            entry="no-dev-endpoints",
            next_step="set dev_mode: true (VLLM_SERVER_DEV_MODE=1) and enable-sleep-mode for it, and restart it",
        )
    can = now.api.capabilities
    if can is not None and (lacks := {"kv_release" if options.kv_only else "sleep"} - set(can)):
        raise Refused(
            f"engine '{now.engine}' on {now.host} (vLLM {now.api.version}) does not offer {lacks.pop()}; it can {can}",
            entry="sleep-refused",
            next_step="use a level that it offers, or another vLLM version",
        )
    _room_for_copy(now, level, options)
    if options.keep and _is_frozen(now):
        return [*_lease(now, options, "asleep"), *_closed(now), SLEEP]
    # A paused engine's sleep is what is wanted as well: the drain's second lock falls away with it.
    return [*_lease(now, options, "asleep"), *([] if now.state == "drained" else _out(now, "asleep")), SLEEP]


def _purpose(now: Observation, options: Options) -> str:
    """What our own lease is for, "" without one."""
    return now.lease.purpose if now.lease is not None and now.lease.owner == options.owner else ""


def _room_for_copy(now: Observation, level: int, options: Options) -> None:
    """A sleep at level 1 takes host memory for the weights, once, and for as long as the process lives.

    :raises Refused: with the numbers.
    """
    if level != 1 or now.gpus is None or now.host_copy_mib == 0:
        return  # without a GPU nothing is copied
    here = f"engine '{now.engine}' on {now.host}"
    need = options.host_copy_mib if options.host_copy_mib is not None else now.host_copy_mib
    if need is None or now.memory is None:
        what = "how much host memory a sleep at level 1 takes" if need is None else "how much host memory is free"
        raise Refused(
            f"{here}: {what} is not known, and too little would kill the engine or its neighbours",
            entry="host-memory-short",
            next_step="give host_copy_mib (the weights' size and a third more), or use level 2, which keeps no copy",
            unseen=now.unseen,
        )
    memory = now.memory
    rooms = {
        f"are available ({memory.available_mib} MiB, {now.promised_mib} MiB of them promised to other sleeps)": (
            memory.available_mib - now.promised_mib
        )
    }
    if memory.limit_mib is not None:
        rooms[f"are left under the unit's limit of {memory.limit_mib} MiB (MemoryMax)"] = (
            memory.limit_mib - memory.rss_mib
        )
    if now.unit is not None and now.unit.locked_limit_mib is not None:
        rooms["may be locked by its processes (LimitMEMLOCK)"] = now.unit.locked_limit_mib
    short = [f"{max(room, 0)} MiB {what}" for what, room in rooms.items() if room < need]
    if short:
        raise Refused(
            f"{here} needs {need} MiB of host memory to sleep at level 1, for the copy of its weights, which it keeps "
            f"as long as it runs; {' and '.join(short)}",
            entry="host-memory-short",
            next_step="use level 2, which keeps no copy; or free host memory or raise the limit",
            left={"needed_mib": need, "available_mib": memory.available_mib, "limit_mib": memory.limit_mib},
        )


def _may_sleep(now: Observation, level: int) -> None:
    """An engine whose weights belong to a preload daemon frees its KV cache only, and gets its weights back by itself.

    One that was started for a daemon and has weights of its own sleeps as usual, but cannot load them anew: the loader
    of --load-format ipc_cache does not know how. Whoever opts in has each wake proved by a golden completion.
    """
    here = f"engine '{now.engine}' on {now.host}"
    if level == 2 and now.lora:
        raise Refused(
            f"{here} has LoRA on: its adapters are gone after level 2, and to load its weights anew with LoRA was seen "
            "to fail (KeyError)",
            entry="sleep-refused",
            next_step="use level 1, or stop it with vllm_engine state=stopped, which frees all of its memory",
        )
    if now.preload is None:
        return
    if now.preload.maps and not now.preload.may_sleep:
        raise Refused(
            f"{here} takes its weights from preload daemon '{now.preload.daemon}' in zero copy: a sleep would free its "
            "KV cache only, and vLLM's documentation forbids the two together",
            entry="sleep-with-zero-copy",
            next_step="use mode copy or no preload for engines that sleep, or set preload.allow_zero_copy_sleep: true",
        )
    if level == 2 and now.preload.weights_source is None:
        _refuse(now, "sleep at level 2", f"find out where its weights come from: {'; '.join(now.preload.why)}")
    if level == 2 and now.preload.weights_source != ZERO_COPY:
        raise Refused(
            f"{here} was started with --load-format ipc_cache and has its weights from {now.preload.weights_source}: "
            "vLLM cannot load them anew after level 2",
            entry="sleep-refused",
            next_step="use level 1",
        )


def _lent(now: Observation) -> bool:
    """Its weights are a preload daemon's: they stay when it sleeps."""
    return now.preload is not None and now.preload.weights_source == ZERO_COPY


def _awake(now: Observation, options: Options) -> list[Step]:
    if now.state == "stopped" and _purpose(now, options) == STOPPED_FOR_SLEEP:
        return [*_lease(now, options, STOPPED_FOR_SLEEP), START, *_back(now)]
    if now.state in ("asleep", "waking") and now.leak and not options.tags:
        return [*_lease(now, options, "awake"), STOP, START, *_back(now)]
    if now.state in ("asleep", "waking"):
        steps = [*_lease(now, options, "awake"), *_rouse(now, options.tags)]
        # The KV cache comes last: without it the engine is not awake as a whole.
        return steps if options.tags and "kv_cache" not in options.tags else [*steps, *_back(now)]
    if now.state in AWAKE:
        # Not asleep. A drain is someone's wish, and a wake must not undo it; a half-done wake of ours is finished.
        ours = now.lease is not None and now.lease.purpose in ("awake", STOPPED_FOR_SLEEP)
        return _finish(now, options) if ours else []
    _refuse(now, "awake", "start or restart it with vllm_engine")


def _reloaded(now: Observation, options: Options) -> list[Step]:
    """New weights at the same path, in the same process. What has been loaded before is known by its digest."""
    if now.state not in AWAKE:
        hint = "wake it first: after level 2 a wake loads what is on disk, after level 1 reload it then"
        started = "a start loads what is on disk: use vllm_engine state=started or restarted"
        _refuse(now, "reloaded", hint if now.state in ("asleep", "waking") else started)
    if now.weights_digest and now.weights_digest == options.digest:
        return _finish(now, options) if _purpose(now, options) == "reloaded" else []
    if now.preload is not None:
        raise Refused(
            f"engine '{now.engine}' on {now.host} takes its weights from preload daemon '{now.preload.daemon}', which "
            "cannot load others while it runs",
            entry="reload-refused",
            next_step="run baremetal.vllm.rolling_restart, which changes the daemon between stop and start",
        )
    can = now.api.capabilities if now.api else None
    if can is not None and "reload" not in can:
        raise Refused(
            f"engine '{now.engine}' on {now.host} has no development endpoints, so it cannot reload",
            entry="no-dev-endpoints",
            next_step="restart it with vllm_engine, or set dev_mode: true for it",
        )
    out = [] if now.state == "drained" else [*_out(now, "reloaded"), PAUSE]
    return [*_lease(now, options, "reloaded"), *out, RELOAD, RESET_CACHE, RESUME, *_back(now, read=True)]


def _rouse(now: Observation, tags: tuple[str, ...] = ()) -> list[Step]:
    """Awake with the right weights. After level 2 they are gone: staged, and from where a killed run left off."""
    done = now.sleep.awake if now.sleep else []
    if now.level == 0:
        whole = [WAKE] if _keeps_kv(now) else [WAKE, RESET_CACHE]
        return whole if not tags or "kv_cache" in tags else []  # its weights have never slept
    gone = now.level == 2 and not _lent(now)
    if gone and now.lora:
        _refuse(now, "awake", "its weights and adapters are gone; restart it with vllm_engine state=restarted")
    if gone and now.preload is not None and now.preload.maps:
        _refuse(now, "awake", "find out where its weights come from, or restart it with vllm_engine")
    if not gone and not done and not tags:
        return [WAKE, RESET_CACHE]
    if tags == ("kv_cache",) and not {"weights", "reloaded"} & set(done):
        _refuse(now, "awake", "wake its weights first, or all of it at once")
    staged = [
        (WAKE_WEIGHTS, "weights", "weights"),
        (RELOAD, "weights", "reloaded"),
        (WAKE_KV, "kv_cache", "kv_cache"),
        (RESET_CACHE, "kv_cache", "cache_reset"),
    ]
    return [
        step
        for step, tag, part in staged
        if part not in done and (not tags or tag in tags) and (step is not RELOAD or gone)
    ]


def _keeps_kv(now: Observation) -> bool:
    return now.level == 0 and now.sleep is not None and not now.sleep.kv_only


def _clean(now: Observation) -> list[Step]:
    """An awake engine with the record of a sleep: its prefix cache may be older than its KV memory."""
    return [RESET_CACHE] if now.sleep is not None else []


def _adapters(now: Observation, *, read: bool = False) -> list[Step]:
    """An engine that sleeps, or slept and was not put back yet: what it says of its adapters proves nothing.

    So also where its weights are ``read`` anew, which drops the adapters from its memory.
    """
    begun = now.sleep is not None or (now.lease is not None and now.lease.purpose in ("awake", "reloaded"))
    doubtful = read or now.state in ("asleep", "waking") or (begun and now.state in AWAKE)
    return [ADAPTERS] if doubtful and now.adapters is not None and now.adapters.kept else []


def _down(now: Observation, options: Options) -> list[Step]:
    """To a stopped unit. What is awake drains first; what is unknown is taken out and stopped."""
    if _is_stopping(now):
        return [STOP]
    if now.gate is None and now.admission_backend in ("haproxy", "command") and not options.force:
        # A gate that is down lets nothing through. A balancer that only we do not reach sends on.
        raise UnknownState(
            f"engine '{now.engine}' on {now.host} is {now.state}, and whether its balancer sends it requests cannot be "
            f"seen: {now.unseen.get('gate', 'it was not seen')}",
            entry="balancer-no-answer",
            next_step="make the balancer answer; with force: true the engine stops nevertheless, and requests may be "
            "lost",
            unseen=now.unseen,
        )
    if now.state in AWAKE:
        quiet = now.state == "drained"
        return [*([] if quiet else _out(now, "stopped")), STOP]
    if now.has_gate and now.gate is not None and _admission(now) == "open":
        return [WITHDRAW, AWAIT_ROUTER, CLOSE, STOP]
    return [STOP]


def _back(now: Observation, *, read: bool = False) -> list[Step]:
    """After a start: admit again what this change itself took out; what was drained on purpose stays out."""
    held = now.lease
    if held is not None and held.purpose == "drained":
        return [PROVE, *_adapters(now, read=read)]
    found = held.restore if held is not None else _admission(now)
    admit = [ADMIT, AWAIT_READY] if now.has_gate and found == "open" else []
    return [PROVE, *_adapters(now, read=read), *admit, RELEASE]


def _finish(now: Observation, options: Options) -> list[Step]:
    """What a run that was killed after the start had still to do."""
    if now.lease is None or now.lease.owner != options.owner or now.lease.purpose == "drained":
        return []
    return [*([RESUME] if now.paused else []), *_clean(now), *_back(now)]


def recover(wanted: str, failed: Step, now: Observation, options: Options, mismatch: bool = False) -> list[Step]:
    """What makes good for a step that failed; nothing, and the change has failed.

    :param now: from before the change.
    :param mismatch: it failed because the engine's answers are not those that it owes.
    """
    if wanted == "asleep" and failed is SLEEP and options.on_failure == "stop":
        return [STOP]
    starts = wanted in ("started", "restarted") and failed in (START, COMPARE_SPEED, PROVE)
    if starts and options.on_failure == "rollback" and now.goes_back and not now.group:
        return [STOP, ROLL_BACK, START, *_back(now)]
    if wanted == "awake" and failed is PROVE and mismatch and options.on_mismatch == "restart":
        return [STOP, START, *_back(now)]
    if wanted == "reloaded" and failed is RELOAD:
        return [STOP, START, *_back(now)]  # what some ranks have loaded and others have not, nobody must use
    return []


def _unit(now: Observation) -> str:
    return f"vllm-engine@{now.engine}.service"


def predict(now: Observation, steps: list[Step], options: Options) -> dict[str, t.Any]:
    """The summary that those steps end in: what check mode and diff show."""
    after = now.summary()
    if not steps:
        return after
    if now.headless:
        after["lease"] = None if RELEASE in steps else options.owner if LEASE in steps else after["lease"]
        if START in steps or STOP in steps:
            after["state"] = "headless" if START in steps else "stopped"
        return after
    if LEASE in steps:
        after["lease"] = options.owner
    if RELEASE in steps:
        after["lease"] = None
    if after["admission"] is not None:
        for step, admission in ((WITHDRAW, "withdrawn"), (CLOSE, "closed"), (ADMIT, "open")):
            after["admission"] = admission if step in steps else after["admission"]
    if RESUME in steps:
        after["paused"] = False
    if PAUSE in steps:
        after.update(paused=True, state="drained", level=None)
    if SLEEP in steps:
        after.update(state="asleep", level=0 if options.kv_only else options.level, paused=True)
    elif WAKE in steps or WAKE_KV in steps or RESET_CACHE in steps:
        after.update(
            state="withdrawn" if after["admission"] not in ("open", None) else "serving", level=None, paused=False
        )
    elif WAKE_WEIGHTS in steps or RELOAD in steps:
        after["state"] = "waking"
    if STOP in steps:
        after.update(state="stopped", level=None, paused=None, proved=False if after["proved"] is not None else None)
    if START in steps:
        after.update(paused=False, level=None, proved=True if after["proved"] is not None else None)
        after["state"] = "serving" if after["admission"] in ("open", None) else "withdrawn"
    elif ADMIT in steps or (PROVE in steps and after["admission"] is None):
        after["state"] = "serving"
    elif AWAIT_IDLE in steps and not {PAUSE, STOP, SLEEP} & set(steps):
        after["state"] = "drained"  # without development endpoints the closed gate is the only lock
    return after
