#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_capacity
short_description: Count how many engines of each pool serve, by asking their gates or HAProxies
version_added: 0.1.0
description:
  - Asks C(/ready) of each gate as a router does, all at once, and fails when fewer engines of a pool than its
    C(min_serving) say 200 before the time-out.
  - A pool whose C(going) engines are all out of rotation already loses nothing, and is not counted.
  - Use it before engines are taken out of rotation, on a host that reaches the other gates. Changes nothing.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
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
  pools:
    description:
      - The pools that lose engines. All of them are counted in the same look.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description:
          - What the pool is called in messages.
        type: str
        required: true
      min_serving:
        description:
          - How many of O(pools[].others) must be ready.
        type: int
        required: true
      others:
        description:
          - The gates to count, by a name for messages.
          - Each is the URL of a gate without a path, such as V(http://10.0.0.5:8001).
          - An engine with admission C(haproxy) has V(haproxy://10.0.0.2:9999,10.0.0.3:9999/POOL/SERVER) in its place.
            It counts when all of these HAProxies send to it.
          - V(uncounted:BACKEND) is an engine that nobody but its own host can be asked about. It never counts, and too
            few others are a failure at once.
        type: dict
        required: true
      going:
        description:
          - The gates of the engines that are about to be taken out, in the same words.
        type: dict
        default: {}
  timeout:
    description:
      - Seconds to wait for these numbers.
    type: float
    default: 60.0
seealso:
  - module: baremetal.vllm.vllm_info
"""

EXAMPLES = r"""
- name: Take this host out only while both others serve its model
  baremetal.vllm.vllm_capacity:
    pools:
      - name: model 'chat'
        min_serving: 2
        going:
          gpu1/chat: http://10.0.0.11:8001
        others:
          gpu2/chat: http://10.0.0.12:8001
          gpu3/chat: http://10.0.0.13:8001
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
pools:
  description:
    - The pools that were counted, at the last look.
    - C(serving) are the engines that were ready, C(left) what the others said.
  returned: always
  type: list
  elements: dict
  sample:
    - name: model 'chat' without gpu1/chat
      min_serving: 2
      serving: [gpu2/chat, gpu3/chat]
      left: {"gpu4/chat": "/ready is 503"}
left:
  description: What those said that are missing.
  returned: on failure
  type: dict
  sample: {"gpu4/chat": "/ready is 503"}
elapsed:
  description: Seconds.
  returned: always
  type: float
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: too-few-serving
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import fail
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.capacity import Pool, await_serving
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "pools": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "min_serving": {"type": "int", "required": True},
                    "others": {"type": "dict", "required": True},
                    "going": {"type": "dict", "default": {}},
                },
            },
            "timeout": {"type": "float", "default": 60.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        result = await_serving([Pool(**one) for one in params["pools"]], params["timeout"])
    except LifecycleError as exc:
        fail(module, exc)
    for one in params["pools"]:
        if one["going"] and not one["others"]:
            names = ", ".join(sorted(one["going"]))
            module.warn(f"{one['name']}: no other engine serves it, so it is out while {names} is changed")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
