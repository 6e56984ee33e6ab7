# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the modules share: argument specs, and errors turned into fail_json once. Private to this collection."""

from __future__ import annotations

import typing as t
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

from ._lifecycle import config
from ._lifecycle.errors import LifecycleError, MissingLibrary, UsageError
from ._lifecycle.lease import LeaseRequest
from ._lifecycle.transition import Wish, change

ENGINES: dict[str, t.Any] = {
    "engine": {"type": "str"},
    "engines": {"type": "list", "elements": "str"},
}
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
ONE_OR_MORE: dict[str, t.Any] = {
    "mutually_exclusive": [("engine", "engines")],
    "required_one_of": [("engine", "engines")],
}


def fail(module: AnsibleModule, error: LifecycleError, **result: t.Any) -> t.NoReturn:
    """The one place where a library error becomes a module failure."""
    keys = {**result, **error.details, "next_step": error.next_step}
    if isinstance(error, MissingLibrary):
        reason = "baremetal.vllm talks to engines with it"
        keys["exception"] = error.import_error
        module.fail_json(msg=f"{missing_required_lib(error.library, reason=reason)} {error.text}", **keys)
    module.fail_json(msg=error.text, **keys)


def chosen_engines(module: AnsibleModule, every: bool = False) -> list[str]:
    """The engines that the task names; with ``every``, all of the host where it names none."""
    if module.params["engine"]:
        return [module.params["engine"]]
    names = module.params["engines"]
    if names is None and every:
        return config.known_engines()
    if not names:
        raise UsageError("engines is empty", next_step="name at least one engine")
    return list(dict.fromkeys(names))


def run_change(module: AnsibleModule, state: str) -> t.NoReturn:
    """Bring every named engine to a state, side by side, and exit with one result for all."""
    params = module.params
    if params["timeout"] <= 0:
        module.fail_json(msg=f"timeout must be above 0 s, not {params['timeout']:g}", changed=False)
    try:
        engines = [config.load(name) for name in chosen_engines(module)]
    except LifecycleError as exc:
        fail(module, exc, changed=False)
    wanted = params["lease"]
    request = LeaseRequest(owner=wanted["owner"], reason=wanted["reason"], ttl=wanted["ttl"], run=params["run"])
    wish = Wish(
        state=state,
        lease=request,
        timeout=params["timeout"],
        mode=params.get("mode", "wait"),
        force=params["force"],
        level=params.get("level", 1),
        kv_only=params.get("kv_only", False),
        deepen=params.get("deepen", True),
        max_resident_mib=params.get("max_resident_mib"),
    )

    def one(engine: config.EngineConfig) -> dict[str, t.Any] | LifecycleError:
        try:
            return change(engine, wish, check=module.check_mode).asdict()
        except LifecycleError as exc:
            return exc

    with ThreadPoolExecutor(max_workers=len(engines)) as pool:
        outcomes = dict(zip([engine.engine for engine in engines], pool.map(one, engines)))
    errors = {name: found for name, found in outcomes.items() if isinstance(found, LifecycleError)}
    results = {
        name: {"failed": True, "msg": found.text, "changed": False, "actions": [], **found.details}
        if isinstance(found, LifecycleError)
        else found
        for name, found in outcomes.items()
    }
    result: dict[str, t.Any] = {
        "changed": any(found["changed"] for found in results.values()),
        "actions": [action for found in results.values() for action in found["actions"]],
        "engines": results,
        "diff": {side: {name: found.get(side) for name, found in results.items()} for side in ("before", "after")},
    }
    if params["engine"]:
        only = results[params["engine"]]
        result.update({key: value for key, value in only.items() if key not in ("failed", "msg")})
    if errors:
        first = next(iter(errors.values()))
        first.details = {**result, "left": {name: found.details.get("left") for name, found in errors.items()}}
        if len(errors) > 1:
            first.args = ("; ".join(str(found) for found in errors.values()),)
        fail(module, first)
    module.exit_json(**result)
