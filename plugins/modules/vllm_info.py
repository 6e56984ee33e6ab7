#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_info
short_description: One observed state of each vLLM engine of a host
version_added: 0.1.0
description:
  - Joins what systemd, the engine, its gate, the GPUs and the lease say into one state for each engine. Signals that
    are missing or contradict each other give the state V(unknown) with the reasons, never a guess.
  - Changes nothing.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
  - baremetal.vllm._common.engines
attributes:
  check_mode:
    support: full
    details: It only reads.
  diff_mode:
    support: N/A
    details: It changes nothing.
  idempotent:
    support: full
options:
  engine:
    description:
      - The name of one engine. Without it and O(engines), all engines of the host.
  journal:
    description:
      - How many of the last lines of each unit's journal to return, in C(journal).
    type: int
    default: 0
"""

EXAMPLES = r"""
- name: See the engines of this host
  baremetal.vllm.vllm_info:
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
  register: seen
"""

RETURN = r"""
engines:
  description:
    - What was seen, by engine name. C(state) is one of V(stopped), V(starting), V(serving), V(withdrawn),
      V(draining), V(drained), V(headless), V(asleep), V(waking), V(failed) and V(unknown); C(reasons) say why;
      C(unseen) names signals that could not be read; C(unit), C(api), C(gate), C(gpus), C(memory), C(lease),
      C(started) and C(last) hold the signals themselves; C(gate) is the word of what stands before the engine,
      whichever C(admission_backend) it has, and its C(forgot) tells that requests come although it was told to keep
      them away, C(differs) in words; C(stale) tells whether the running process has another configuration than is on
      disk.
    - C(group) names the replica across hosts that it is a part of, and C(headless) tells whether its API server is
      another host's engine. V(headless) as C(state) is such an engine whose process runs; what it does, its head
      proves.
    - C(preload) is null for an engine without a preload daemon. Else C(daemon) names it and C(state) is its state, or
      V(lost) where the engine serves from what a daemon that has ended left behind. C(weights_source) is
      V(preload_zero_copy), V(preload_copy), V(disk), or null where log and memory do not prove it. C(next_start) is
      what a restart would be, V(zero-copy), V(copy), V(cold) or V(refused). C(why) explains what is not as it was asked
      for; C(wrong) says that it serves other weights than its checkpoint's.
    - C(adapters) tells of LoRA adapters. C(enabled) says whether the engine is configured for them, C(declared) lists
      those that its role declares, C(loaded) those that it has, each with C(name), C(path), C(parent), the C(digest) of
      its files as they were when it was loaded (empty where somebody else loaded it) and whether it is C(proved).
      C(loaded) is null where the engine was not seen. C(left) says of each declared adapter that is not there as
      declared why; changed files are seen where that takes no time.
    - C(golden) is null where the process was not compared with a golden. Else C(matches) says what came of the last
      comparison, C(key) with which golden, C(at) since when that is known; where no process runs, of the last one.
    - C(journal) has the last lines of the unit's journal, as many as O(journal) asks for.
  returned: success
  type: dict
  sample: {"chat": {"state": "serving", "reasons": [], "unseen": {"gpu": "NVML: Driver Not Loaded"}}}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: engine-unknown
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import ENGINES, chosen_engines, fail, refuse_option
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import config
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.observe import observe
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.unit import Unit


def main() -> None:
    module = AnsibleModule(
        argument_spec={**ENGINES, "journal": {"type": "int", "default": 0}},
        supports_check_mode=True,
        mutually_exclusive=[("engine", "engines")],
    )
    lines = module.params["journal"]
    if lines < 0:
        refuse_option(module, f"journal is {lines}; it is a number of lines")
    seen = {}
    try:
        for name in chosen_engines(module, every=True):
            engine = config.load(name)
            seen[name] = {**observe(engine).asdict(), "journal": Unit(engine.unit).journal(lines) if lines else []}
    except LifecycleError as exc:
        fail(module, exc)
    module.exit_json(changed=False, engines=seen)


if __name__ == "__main__":
    main()
