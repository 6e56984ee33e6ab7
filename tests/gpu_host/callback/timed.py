"""Writes every task of a run to the file $TIMED_LOG, one JSON object a line: its name, how long it took, its result."""

from __future__ import annotations

import json
import os
import time

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: timed
type: aggregate
short_description: Write every task with its duration and result to a file
description:
  - For measurements. Durations are those of the task on the controller, connection and module start included.
options: {}
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "timed"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.begun = {}

    def v2_runner_on_start(self, host, task):
        self.begun[task._uuid] = time.time()

    def _write(self, result, outcome):
        # The names of these attributes changed with ansible-core 2.19.
        task = getattr(result, "task", None) or result._task
        value = getattr(result, "result", None) or result._result
        begun = self.begun.get(task._uuid, time.time())
        line = {
            "task": task.get_name(),
            "action": task.action,
            "outcome": outcome,
            "seconds": round(time.time() - begun, 3),
            "result": json.loads(self._dump_results(value)),
        }
        with open(os.environ["TIMED_LOG"], "a") as log:
            log.write(json.dumps(line) + "\n")

    def v2_runner_on_ok(self, result):
        self._write(result, "ok")

    def v2_runner_on_failed(self, result, ignore_errors=False):
        self._write(result, "failed")

    def v2_runner_on_unreachable(self, result):
        self._write(result, "unreachable")
