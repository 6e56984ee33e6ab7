#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_watch
short_description: Watch vLLM engines at work for a while, and fail when too many requests do
version_added: 0.1.0
description:
  - Counts the requests that an engine's gate passes and those that end in a 5xx, and takes the engine's own times (mean
    time to the first token, mean time for each further token), from now or O(since), until O(seconds) later.
  - It fails as soon as too many requests fail, the engine does not serve any more, or its process is another one. Adds
    no request of its own, except for O(prove). Changes nothing.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
  - baremetal.vllm._common.long
  - baremetal.vllm._common.engines
attributes:
  check_mode:
    support: full
    details: It only looks.
  diff_mode:
    support: N/A
    details: It changes nothing.
  idempotent:
    support: full
options:
  seconds:
    description:
      - How long to watch, counted from the reading in O(since) where that is given.
      - V(0) takes one reading, with which later calls begin.
    type: float
    default: 0.0
  since:
    description:
      - The readings of an earlier call (RV(engines) with its C(reading)), by engine. So a long watch can be made of
        several calls, each of which shows how far it is.
    type: dict
    default: {}
  max_error_share:
    description:
      - The share of requests that may end in a 5xx, from V(0) to V(1). V(1) only counts.
    type: float
    default: 1.0
  prove:
    description:
      - Prove each engine at the end, by its golden where one is on record and else by a completion.
    type: bool
    default: false
seealso:
  - module: baremetal.vllm.vllm_golden
  - module: baremetal.vllm.vllm_info
"""

EXAMPLES = r"""
- name: Watch what was just changed for five minutes
  baremetal.vllm.vllm_watch:
    engine: chat
    seconds: 300
    max_error_share: 0.01
    prove: true
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
engines:
  description:
    - By engine, C(reading), with which it began, for O(since) of a later call; C(watched), with C(seconds),
      C(requests), C(errors), C(error_share), C(latency) (means in seconds by C(first_token) and C(per_token), null
      without a request) and C(restarted_gate), which tells that the gate's counters began anew meanwhile; and C(proof)
      with O(prove).
    - After a failure each engine has C(msg) or what was seen of it.
  returned: always
  type: dict
  sample:
    chat:
      reading: {"at": 1764460800.0, "main_pid": 812, "gate": true, "requests": 1203, "errors": 0, "latencies": {}}
      watched:
        seconds: 300.2
        requests: 5104
        errors: 0
        error_share: 0.0
        latency: {"first_token": 0.041, "per_token": 0.0061}
        restarted_gate: false
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: soak-failed
"""

from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import (
    ENGINES,
    ONE_OR_MORE,
    chosen_engines,
    fail,
    refuse_option,
    speak_for_all,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside, config
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.watch import read_back, watch


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={
            **ENGINES,
            "seconds": {"type": "float", "default": 0.0},
            "since": {"type": "dict", "default": {}},
            "max_error_share": {"type": "float", "default": 1.0},
            "prove": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    params = module.params
    if not 0 <= params["seconds"] < 1e6:
        refuse_option(module, "seconds must be from 0 to 1000000")
    if not 0 <= params["max_error_share"] <= 1:
        refuse_option(module, "max_error_share must be from 0 to 1")
    try:
        engines = {name: config.load(name) for name in chosen_engines(module)}
        since = {name: read_back(params["since"][name]) for name in engines if name in params["since"]}
    except LifecycleError as exc:
        fail(module, exc, changed=False)

    def one(name: str) -> dict | LifecycleError:
        try:
            return watch(
                engines[name],
                since.get(name),
                params["seconds"],
                params["max_error_share"],
                progress.about(name),
                prove=params["prove"],
            )
        except LifecycleError as exc:
            return exc

    with ThreadPoolExecutor(max_workers=len(engines)) as pool:
        found = dict(zip(engines, pool.map(one, engines)))
    results = {
        name: {"failed": True, "msg": one.text, "runbook": one.entry, **one.details}
        if isinstance(one, LifecycleError)
        else one
        for name, one in found.items()
    }
    errors = [one for one in found.values() if isinstance(one, LifecycleError)]
    if errors:
        fail(module, speak_for_all(errors), changed=False, engines=results)
    module.exit_json(changed=False, engines=results)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
