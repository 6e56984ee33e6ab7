#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_job
short_description: Look at a task of this collection that goes on in the background of a host
version_added: 0.1.0
description:
  - The modules of this collection that may take minutes, such as M(baremetal.vllm.vllm_drain), go on in the background
    of the host when they are not done after some seconds. Their action plugin looks at them with this module until they
    are done, and shows how far they are. No playbook has to call it.
  - Gives either what is being done, or the very result of the other module, failures included.
  - Changes nothing. A result is kept for 15 minutes, so that a lost connection loses no result.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
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
  job:
    description:
      - The directory that the other module has named as C(vllm_job).
    type: path
    required: true
  wait:
    description:
      - For how many seconds to wait for the end.
    type: float
    default: 0.0
seealso:
  - module: baremetal.vllm.vllm_info
"""

EXAMPLES = r"""
- name: Look at what goes on there
  baremetal.vllm.vllm_job:
    job: /run/vllm-lifecycle/jobs/ab12cd34
"""

RETURN = r"""
vllm_job:
  description: The directory of the job.
  returned: while it goes on
  type: str
  sample: /run/vllm-lifecycle/jobs/ab12cd34
progress:
  description:
    - What is being done, by engine, daemon or path, as C(says), and for how many C(seconds) that sentence has stood.
  returned: while it goes on
  type: dict
  sample: {"chat": {"says": "draining, 3 running, 0 waiting, 3 session(s) at its gate, 42 of 900 s", "seconds": 2.1}}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: task-lost
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import fail
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError


def main() -> None:
    module = AnsibleModule(
        argument_spec={"job": {"type": "path", "required": True}, "wait": {"type": "float", "default": 0.0}},
        supports_check_mode=True,
    )
    try:
        found = aside.look(module.params["job"], module.params["wait"])
    except LifecycleError as exc:
        fail(module, exc, changed=False)
    if isinstance(found, dict):
        module.exit_json(**found)
    aside.end_with(*found)


if __name__ == "__main__":
    main()
