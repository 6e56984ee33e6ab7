# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs a module that may take minutes, and shows meanwhile how far it is. Private to this collection.

A module that is done within ``vllm_progress`` seconds is called once, as any other. One that is not goes on in the
background of its host (module_utils/_lifecycle/aside.py). It is then looked at by short calls of the module vllm_job,
so that no connection has to last for minutes, and one that is lost costs nothing but time.
"""

from __future__ import annotations

import time
import typing as t

from ansible import constants, context
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible.utils.vars import merge_hash

from ansible_collections.baremetal.vllm.plugins.plugin_utils._progress import Teller, is_quiet, seconds_between

# As the library names it, which is not imported here: it runs on hosts.
VARIABLE = "VLLM_LIFECYCLE_ASIDE"
# How long a host may be out of reach in the middle of a task, and how often it is tried.
PATIENCE = 60.0
RETRY = 5.0


class LongAction(ActionBase):
    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        if self._task.async_val:  # the user's own: Ansible itself looks at it
            return merge_hash(result, self._execute_module(task_vars=task_vars, wrap_async=True))
        task_vars = task_vars or {}
        try:
            every = seconds_between(self._templar.template(task_vars.get("vllm_progress", True)))
        except ValueError as exc:
            raise AnsibleActionFail(f"{exc} (runbook: playbook-variable)") from exc
        found = self._begin(every, task_vars) if every else self._execute_module(task_vars=task_vars)
        if "vllm_job" in found:
            found = self._follow(found, every, task_vars)
        result = merge_hash(result, found)
        self._remove_tmp_path(self._connection._shell.tmpdir)
        return result

    def _begin(self, every: float, task_vars: dict[str, t.Any]) -> dict[str, t.Any]:
        self._task.environment.append({VARIABLE: f"{every:g}"})
        try:
            return self._execute_module(task_vars=task_vars)
        finally:
            del self._task.environment[-1]

    def _follow(self, found: dict[str, t.Any], every: float, task_vars: dict[str, t.Any]) -> dict[str, t.Any]:
        """Look until it is done. The result is as the module gave it."""
        job = found["vllm_job"]
        host = task_vars.get("inventory_hostname", "")
        teller = Teller(f"{host} -> {self._task.delegate_to}" if self._task.delegate_to else host)
        lost: float | None = None
        while "vllm_job" in found:
            self._show(teller.lines(found["progress"], time.monotonic()))
            try:
                found = self._execute_module(
                    module_name="baremetal.vllm.vllm_job", module_args={"job": job, "wait": every}, task_vars=task_vars
                )
                lost = None
            except AnsibleConnectionFailure as exc:
                lost = time.monotonic() if lost is None else lost
                seconds = time.monotonic() - lost
                if seconds >= PATIENCE:
                    raise AnsibleConnectionFailure(
                        f"{exc} (no connection for {seconds:.0f} s; what this task began goes on there until its own "
                        "time-out: run this again when the host is back) (runbook: host-lost)"
                    ) from exc
                found = {
                    "vllm_job": job,
                    "progress": {"": {"says": f"no connection, tries again: {exc}", "seconds": 0}},
                }
                self._connect_anew()
        self._remove(job)
        return found

    def _show(self, lines: list[str]) -> None:
        try:
            ok_hosts = constants.config.get_config_value(
                "display_ok_hosts", plugin_type="callback", plugin_name=constants.DEFAULT_STDOUT_CALLBACK
            )
        except (AnsibleError, KeyError):  # that callback has no such option
            ok_hosts = True
        one_line = context.CLIARGS.get("one_line", False)
        if self._task.no_log or one_line or is_quiet(constants.DEFAULT_STDOUT_CALLBACK, ok_hosts):
            return
        for line in lines:
            Display().display(line)

    def _connect_anew(self) -> None:
        try:
            self._connection.reset()
        except (AnsibleError, AttributeError):  # not every kind of connection has that, and the host may still be away
            self._connection.close()
        time.sleep(RETRY)

    def _remove(self, job: str) -> None:
        """The host does so by itself where this fails, only later."""
        try:
            self._low_level_execute_command(self._connection._shell.remove(job, recurse=True))
        except AnsibleConnectionFailure as exc:
            Display().vvv(f"{job} is left to its host: {exc}")
