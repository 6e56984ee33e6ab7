# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What all modules share: options, and errors turned into fail_json once. Private to this collection.

What only modules that change something need is in _change.py: Ansible sends to each host whatever a module imports,
and each call reads it there.
"""

from __future__ import annotations

import typing as t

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

from . import _installed  # noqa: F401  # pylint: disable=unused-import  # says where the library comes from
from ._lifecycle import config
from ._lifecycle.errors import LifecycleError, MissingLibrary, UsageError

ENGINES: dict[str, t.Any] = {
    "engine": {"type": "str"},
    "engines": {"type": "list", "elements": "str"},
}
ONE_OR_MORE: dict[str, t.Any] = {
    "mutually_exclusive": [("engine", "engines")],
    "required_one_of": [("engine", "engines")],
}


def fail(module: AnsibleModule, error: LifecycleError, **result: t.Any) -> t.NoReturn:
    """The one place where a library error becomes a module failure."""
    keys = {**result, **error.details, "next_step": error.next_step, "runbook": error.entry}
    if isinstance(error, MissingLibrary):
        reason = "baremetal.vllm talks to engines with it"
        keys["import_error"] = error.import_error
        module.fail_json(msg=f"{missing_required_lib(error.library, reason=reason)} {error.text}", **keys)
    module.fail_json(msg=error.text, **keys)


def speak_for_all(errors: t.Sequence[LifecycleError]) -> LifecycleError:
    """The first of them, with the messages of all."""
    if len(errors) > 1:
        errors[0].args = ("; ".join(f"{error} {error.reference}" for error in errors),)
    return errors[0]


def refuse_option(module: AnsibleModule, msg: str) -> t.NoReturn:
    """An option has a value that its type allows and its meaning does not; nothing was touched."""
    fail(module, UsageError(msg, entry="option-value"), changed=False)


def chosen_engines(module: AnsibleModule, every: bool = False) -> list[str]:
    """The engines that the task names; with ``every``, all of the host where it names none."""
    if module.params["engine"]:
        return [module.params["engine"]]
    names = module.params["engines"]
    if names is None and every:
        return config.known_engines()
    if not names:
        raise UsageError("engines is empty", entry="option-value", next_step="name at least one engine")
    return list(dict.fromkeys(names))
