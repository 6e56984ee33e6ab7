#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_capacity
short_description: Count how many engines serve, by asking their gates as a router does, or their HAProxies
version_added: 0.1.0
description:
  - Asks C(/ready) of each gate, all at once, and fails when fewer than O(min_serving) say 200 before the time-out.
  - Use it before an engine is taken out of rotation, on a host that reaches the other gates. Changes nothing.
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
  endpoints:
    description:
      - The gates to count, by a name for messages.
      - Each is the URL of a gate without a path, such as V(http://10.0.0.5:8001).
      - An engine with admission C(haproxy) has V(haproxy://10.0.0.2:9999,10.0.0.3:9999/POOL/SERVER) in its place. It
        counts when all of these HAProxies send to it.
      - V(uncounted:BACKEND) is an engine that nobody but its own host can be asked about. It never counts, and too few
        others are a failure at once.
    type: dict
    required: true
  min_serving:
    description:
      - How many of them must be ready.
    type: int
    required: true
  timeout:
    description:
      - Seconds to wait for that number.
    type: float
    default: 60.0
seealso:
  - module: baremetal.vllm.vllm_info
"""

EXAMPLES = r"""
- name: Take this host out only while both others serve
  baremetal.vllm.vllm_capacity:
    endpoints:
      gpu2/chat: http://10.0.0.12:8001
      gpu3/chat: http://10.0.0.13:8001
    min_serving: 2
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
serving:
  description: The names of the gates that were ready at the last look.
  returned: always
  type: list
  elements: str
  sample: [gpu2/chat, gpu3/chat]
left:
  description: What the others said.
  returned: always
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
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import fail
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.capacity import await_serving
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoints": {"type": "dict", "required": True},
            "min_serving": {"type": "int", "required": True},
            "timeout": {"type": "float", "default": 60.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        result = await_serving(params["endpoints"], params["min_serving"], params["timeout"])
    except LifecycleError as exc:
        fail(module, exc)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
