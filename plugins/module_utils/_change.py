# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the modules share that bring engines to a state. Private to this collection."""

from __future__ import annotations

import typing as t
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

from ._glue import ENGINES, chosen_engines, fail, refuse_option, speak_for_all
from ._lifecycle import config
from ._lifecycle.adapters_change import AdapterWish, change_adapters
from ._lifecycle.aside import Progress
from ._lifecycle.errors import LifecycleError
from ._lifecycle.lease import LeaseRequest
from ._lifecycle.transition import Outcome, Report, Wish, change

CHANGE: dict[str, t.Any] = {
    **ENGINES,
    "timeout": {"type": "float", "default": 900.0},
    "lease": {
        "type": "dict",
        "options": {
            "owner": {"type": "str", "default": "ansible"},
            "reason": {"type": "str", "default": ""},
            "ttl": {"type": "float", "default": 14400.0},
        },
        "apply_defaults": True,
    },
    "run": {"type": "str", "default": ""},
    "force": {"type": "bool", "default": False},
}


def run_change(module: AnsibleModule, state: str, progress: Progress) -> t.NoReturn:
    """Bring every named engine to a state, side by side, and exit with one result for all."""
    params = module.params
    wanted = params["lease"]
    wish = Wish(
        state=state,
        lease=LeaseRequest(owner=wanted["owner"], reason=wanted["reason"], ttl=wanted["ttl"], run=params["run"]),
        timeout=params["timeout"],
        mode=params.get("mode", "wait"),
        force=params["force"],
        level=params.get("level", 1),
        kv_only=params.get("kv_only", False),
        deepen=params.get("deepen", True),
        max_resident_mib=params.get("max_resident_mib"),
        host_copy_mib=params.get("host_copy_mib"),
        on_failure=params.get("on_failure", "fail"),
        on_mismatch=params.get("on_mismatch", "fail"),
        tags=tuple(params.get("tags") or ()),
        min_speed_ratio=params.get("min_speed_ratio") or 0.0,
        measure=params.get("measure", False),
    )
    _refuse_bad_numbers(module)
    try:
        engines = {name: config.load(name) for name in chosen_engines(module)}
    except LifecycleError as exc:
        fail(module, exc, changed=False)

    def changer(engine: config.EngineConfig) -> t.Callable[[Report], Outcome]:
        return lambda report: change(engine, wish, check=module.check_mode, report=report)

    exit_with(module, {name: changer(engine) for name, engine in engines.items()}, progress)


def run_adapters(module: AnsibleModule, progress: Progress) -> t.NoReturn:
    """Bring the LoRA adapters of every named engine to what is wanted, side by side, and exit with one result."""
    params = module.params
    given = params["adapters"]
    wish = AdapterWish(
        adapters=None if given is None else [config.AdapterConfig(**one) for one in given],
        state=params["state"],
        lease=LeaseRequest(
            owner=params["lease"]["owner"], reason=params["lease"]["reason"], ttl=params["lease"]["ttl"]
        ),
        timeout=params["timeout"],
        force=params["force"],
    )
    _refuse_bad_numbers(module)
    try:
        engines = {name: config.load(name) for name in chosen_engines(module)}
    except LifecycleError as exc:
        fail(module, exc, changed=False)

    def changer(engine: config.EngineConfig) -> t.Callable[[Report], Outcome]:
        return lambda report: change_adapters(engine, wish, module.check_mode, report)

    exit_with(module, {name: changer(engine) for name, engine in engines.items()}, progress)


def _refuse_bad_numbers(module: AnsibleModule) -> None:
    numbers = {"timeout": module.params["timeout"], "lease.ttl": module.params["lease"]["ttl"]}
    for name in ("max_resident_mib", "host_copy_mib"):
        if module.params.get(name) is not None:
            numbers[name] = module.params[name]
    for name, value in numbers.items():
        if not 0 < value < 1e9:
            refuse_option(module, f"{name} must be above 0, not {value:g}")


def exit_with(
    module: AnsibleModule, changes: dict[str, t.Callable[[Report], Outcome]], progress: Progress, many: str = "engines"
) -> t.NoReturn:
    """Carry out the named changes side by side, and exit with one result for all, under the key ``many``."""

    def one(name: str) -> dict[str, t.Any] | LifecycleError:
        try:
            return changes[name](progress.about(name)).asdict()
        except LifecycleError as exc:
            return exc
        finally:
            progress.done(name)

    with ThreadPoolExecutor(max_workers=len(changes)) as pool:
        outcomes = dict(zip(changes, pool.map(one, changes)))
    errors = {name: found for name, found in outcomes.items() if isinstance(found, LifecycleError)}
    results = {
        name: {
            "failed": True,
            "msg": found.text,
            "runbook": found.entry,
            "changed": False,
            "actions": [],
            **found.details,
        }
        if isinstance(found, LifecycleError)
        else found
        for name, found in outcomes.items()
    }
    result: dict[str, t.Any] = {
        "changed": any(found["changed"] for found in results.values()),
        "actions": [action for found in results.values() for action in found["actions"]],
        many: results,
        "diff": {side: {name: found.get(side) for name, found in results.items()} for side in ("before", "after")},
    }
    if len(results) == 1:
        only = next(iter(results.values()))
        result.update({key: value for key, value in only.items() if key not in ("failed", "msg")})
    for name, found in results.items():
        if found.get("admission_backend") == "none" and any("requests in flight" in one for one in found["actions"]):
            module.warn(
                f"engine '{name}' has admission none: nobody was told to keep requests away, and its own gauges alone "
                "say that it has none"
            )
    if errors:
        first = speak_for_all(list(errors.values()))
        first.details = {**result, "left": {name: found.details.get("left") for name, found in errors.items()}}
        fail(module, first)
    module.exit_json(**result)
