#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_page_cache
short_description: See how much of an engine's checkpoint is in the page cache, or get it out of there
version_added: 0.1.0
description:
  - With O(state=dropped) the next start of the engine reads its weights from the disk, as after a boot of the host.
  - Only the files of the engine's checkpoint are touched, not the page cache of the host as a whole. What was dropped
    is looked at again, since the kernel keeps what another process maps, and all of a file system in memory.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
attributes:
  check_mode:
    support: full
    details: It only looks.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  engine:
    description:
      - The name of one engine of the host.
    type: str
    required: true
  state:
    description:
      - V(seen) only looks.
      - V(dropped) fails when more than a hundredth stays.
    type: str
    choices: [seen, dropped]
    default: seen
seealso:
  - module: baremetal.vllm.vllm_engine
"""

EXAMPLES = r"""
- name: Let the next start read from the disk
  baremetal.vllm.vllm_page_cache:
    engine: chat
    state: dropped
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
changed:
  description: Whether files of the checkpoint were in the page cache, and are to be dropped.
  returned: success
  type: bool
model:
  description: The checkpoint.
  returned: success
  type: str
  sample: /srv/models/large
total_mib:
  description: The size of its files.
  returned: success
  type: int
  sample: 13294
cached_share:
  description: The share of them that was in the page cache, before anything was dropped.
  returned: success
  type: float
  sample: 0.9987
left:
  description: What stays.
  returned: on failure to drop it
  type: dict
  sample: {"cached_mib": 13294}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: page-cache
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import fail
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import config, page_cache
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["seen", "dropped"], "default": "seen"},
        },
        supports_check_mode=True,
    )
    drop = module.params["state"] == "dropped"
    try:
        model = config.load(module.params["engine"]).model
        before = page_cache.drop(model) if drop and not module.check_mode else page_cache.seen(model)
    except LifecycleError as exc:
        fail(module, exc, changed=False)
    module.exit_json(
        changed=drop and before.share > page_cache.LEFT,
        model=model,
        total_mib=before.total // page_cache.MIB,
        cached_share=before.share,
    )


if __name__ == "__main__":
    main()
