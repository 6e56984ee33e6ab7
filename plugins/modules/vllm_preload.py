#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_preload
short_description: Have a preload daemon ready, or gone
version_added: 0.1.0
description:
  - With O(state=ready) the unit is active, its health is 200, each rank's socket accepts connections, and its
    processes hold the memory of the weights. A daemon that has given its weights away is started anew.
  - With O(state=absent) the unit is stopped and its GPU memory is proved free.
  - Neither is done while an engine that uses the daemon runs. It would keep the memory, and the next daemon would
    hold a second copy beside it.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
attributes:
  check_mode:
    support: full
    details: A prediction from reads alone. Whether the daemon will load cannot be known.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  daemon:
    description:
      - The name of a preload daemon of the host.
    type: str
    required: true
  state:
    description:
      - The wanted state.
    type: str
    choices: [ready, absent]
    default: ready
  timeout:
    description:
      - Seconds for the whole change. Running out is a failure that names what is left.
    type: float
    default: 900.0
  force:
    description:
      - Go on although an engine that uses the daemon runs.
    type: bool
    default: false
seealso:
  - module: baremetal.vllm.vllm_engine
"""

EXAMPLES = r"""
- name: Have the weights on the GPU before the engine starts
  baremetal.vllm.vllm_preload:
    daemon: base
    timeout: 1800
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
changed:
  description: Whether anything was changed, also by a run that failed later.
  returned: always
  type: bool
actions:
  description: What was done, or in check mode would be done, one sentence a step.
  returned: always
  type: list
  elements: str
  sample: ["base: start the daemon and wait until it is proved ready"]
before:
  description: The state before, and the running engines that use the daemon.
  returned: always
  type: dict
  sample: {"state": "absent", "mapped_by": []}
after:
  description: The state after, observed anew; in check mode the predicted one.
  returned: success
  type: dict
  sample: {"state": "ready", "mapped_by": []}
elapsed:
  description: Seconds.
  returned: success
  type: float
  sample: 49.2
timings:
  description: Seconds by step.
  returned: always
  type: dict
  sample: {"start": 49.1}
held_mib:
  description: MiB that the daemon's processes hold, by GPU UUID. Empty where no GPU can be seen.
  returned: success, not in check mode
  type: dict
left:
  description: What stood in the way.
  returned: on failure
  type: dict
  sample: {"base": {"mapped_by": ["chat"]}}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import exit_with, fail
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.preload import change_preload, load
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import silent


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "daemon": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["ready", "absent"], "default": "ready"},
            "timeout": {"type": "float", "default": 900.0},
            "force": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    if params["timeout"] <= 0:
        module.fail_json(msg=f"timeout must be above 0, not {params['timeout']:g}", changed=False)
    try:
        daemon = load(params["daemon"])
    except LifecycleError as exc:
        fail(module, exc, changed=False)

    def carry_out():
        return change_preload(daemon, params["state"], params["timeout"], params["force"], module.check_mode, silent)

    exit_with(module, {params["daemon"]: carry_out}, many="daemons")


if __name__ == "__main__":
    main()
