#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_preload
short_description: Have a preload daemon ready, or gone
version_added: 0.1.0
description:
  - With O(state=ready) the unit is active, its health is 200, each rank's socket accepts connections, its processes
    hold the memory of the weights, and what they have loaded is what the checkpoint holds now, file by file. vLLM
    itself compares no value of any tensor. A daemon that has given its weights away, or that runs with an older
    version, driver or settings, is started anew.
  - With O(state=absent) the unit is stopped and its GPU memory is proved free.
  - Neither is done while an engine may map its memory, or that of its predecessor. The engine would keep the memory,
    and the next daemon hold a second copy beside it. Engines are found by their declaration, and by the processes on
    the daemon's GPUs; one whose log and memory show weights of its own is none of them.
  - Nothing is said to the daemon, whose sockets speak pickle. They are only connected to.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
  - baremetal.vllm._common.long
attributes:
  check_mode:
    support: full
    details: A prediction from reads alone. The checkpoint is hashed where that is not known yet, and nothing is
      remembered of it. Whether the daemon will load cannot be known.
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
      - Go on although an engine may map its memory. Put up with a second copy of the weights on the GPU.
    type: bool
    default: false
seealso:
  - module: baremetal.vllm.vllm_engine
  - module: baremetal.vllm.vllm_weights
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
  description: The state before, and the running engines that may map the daemon's memory.
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
  description: MiB that the daemon's processes hold, by GPU UUID. In check mode as they were found.
  returned: success
  type: dict
digest:
  description: The manifest's digest of what it has loaded; empty where no daemon is proved to have loaded anything.
  returned: success
  type: str
  sample: sha256:2f1c4a6e0b5d8c9fa7e3b1d2c4f60718293a4b5c6d7e8f90a1b2c3d4e5f60718
engines:
  description:
    - Where each running engine of this daemon has its weights from, by what its log of this start says and its memory
      does not contradict. V(preload_zero_copy), V(preload_copy), V(disk), or null where that is not proved.
  returned: always, once the daemon was looked at
  type: dict
  sample: {"chat": "preload_zero_copy"}
lost:
  description: Engines that serve from what a daemon that has ended left behind. They keep it until their next restart.
  returned: success
  type: list
  elements: str
reasons:
  description: Why the state is what it is. In check mode as it was found.
  returned: success
  type: list
  elements: str
left:
  description: What stood in the way.
  returned: on failure
  type: dict
  sample: {"base": {"mapped_by": ["chat"], "lost": []}}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: preload-mapped
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._change import exit_with
from ansible_collections.baremetal.vllm.plugins.module_utils._glue import fail, refuse_option
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.preload import load
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.preload_change import change_preload


def work(progress: Progress) -> None:
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
        refuse_option(module, f"timeout must be above 0, not {params['timeout']:g}")
    try:
        daemon = load(params["daemon"])
    except LifecycleError as exc:
        fail(module, exc, changed=False)

    def carry_out(report):
        return change_preload(daemon, params["state"], params["timeout"], params["force"], module.check_mode, report)

    exit_with(module, {params["daemon"]: carry_out}, progress, many="daemons")


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
