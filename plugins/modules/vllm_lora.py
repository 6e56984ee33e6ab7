#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_lora
short_description: Bring the LoRA adapters of a running vLLM engine to a declared state
version_added: 0.1.0
description:
  - Loads the adapters that are missing, loads those anew whose path or files have changed, and with O(state=exact)
    unloads the others. vLLM does not tell what an adapter's files held when it read them, so a manifest of them is kept
    for each adapter that this module, a start or a wake has loaded.
  - Each adapter is proved by an answer that differs from the model's own. vLLM answers 200 to the load of an adapter
    that has no effect, and of one that was made for another model.
  - An engine serves on while an adapter is loaded. To unload one, also for other content of the same name, takes a name
    away that clients may be using. That is refused unless the engine is out of rotation and idle, as after
    M(baremetal.vllm.vllm_drain), or O(force) is set. Requests in flight finish in either case; the next ones for that
    name get 404.
  - Other content under the same name and path needs a reset of the prefix cache, or answers would mix both. The engine
    does that in a moment without requests, and has to have its development endpoints.
  - An engine that is drained stays so. It is resumed behind its closed gate as long as its adapters are proved.
  - Takes no lease, since it puts no engine out of service. It respects that of another owner than O(lease.owner).
  - Needs E(VLLM_ALLOW_RUNTIME_LORA_UPDATING=1) and C(enable-lora) when the engine starts. The role
    P(baremetal.vllm.vllm_engine#role) sets the former for engines that declare adapters. Their start loads and proves
    those, and each wake proves them again.
  - Refuses an adapter of a higher rank than C(max-lora-rank), and more adapters than C(max-cpu-loras), beyond which
    vLLM reads dropped ones again while it serves, and dies when their files are gone.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
  - baremetal.vllm._common.long
  - baremetal.vllm._common.engines
  - baremetal.vllm._common.change
attributes:
  check_mode:
    support: partial
    details: Whether an adapter has an effect is seen when it is loaded; check mode predicts that each one has. It
      hashes the adapters' files and does not remember that.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  adapters:
    description:
      - The adapters to have. Without it, those that the engine's role declares.
      - What is not declared there is forgotten when the engine restarts; see RV(not_declared).
    type: list
    elements: dict
    suboptions:
      name:
        description:
          - The name that requests give as their model. Not the name of the model itself.
        type: str
        required: true
      path:
        description:
          - The directory on the host with C(adapter_config.json) and C(adapter_model.safetensors). Absolute, without
            C(..) and without a slash at its end. The engine's user must be able to read it, and as long as the adapter
            is loaded.
        type: str
        required: true
      base:
        description:
          - What C(base_model_name_or_path) in C(adapter_config.json) has to be. vLLM does not look at it.
        type: str
        default: ""
      prove:
        description:
          - Whether its answers have to differ from the model's. Set it to V(false) for an adapter that changes nothing,
            such as one before its training.
        type: bool
        default: true
  state:
    description:
      - With V(present) other adapters stay loaded. With V(exact) they are unloaded.
    type: str
    choices: [present, exact]
    default: present
  force:
    description:
      - Go on although someone else holds the lease, and unload what clients may be using.
seealso:
  - module: baremetal.vllm.vllm_drain
  - module: baremetal.vllm.vllm_info
"""

EXAMPLES = r"""
- name: Serve two adapters beside the model
  baremetal.vllm.vllm_lora:
    engine: chat
    adapters:
      - name: sql
        path: /srv/adapters/sql-7
        base: Qwen/Qwen3-8B
      - name: legal
        path: /srv/adapters/legal-2
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python

- name: Have exactly those that the inventory declares, on an engine that was drained for it
  baremetal.vllm.vllm_lora:
    engine: chat
    state: exact
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
changed:
  description: Whether an adapter was loaded or unloaded, also by a run that failed later.
  returned: always
  type: bool
actions:
  description: What was done, or in check mode would be done, one sentence a step.
  returned: always
  type: list
  elements: str
  sample: ["chat: load adapter 'sql' from /srv/adapters/sql-7", "chat: prove adapter 'sql' by its answers"]
engines:
  description:
    - The result of each engine, by name, with the keys C(changed), C(actions), C(before), C(after), C(elapsed),
      C(timings) and C(not_declared); after a failure also C(left).
  returned: always
  type: dict
before:
  description:
    - The adapters before, for O(engine), each with its C(path), the C(digest) of its files as they were when it was
      loaded, and whether it is C(proved). The digest is empty where somebody else loaded it.
  returned: when one engine is named
  type: dict
  sample: {"adapters": {}}
after:
  description: The adapters after, observed anew; in check mode the predicted ones.
  returned: when one engine is named
  type: dict
  sample: {"adapters": {"sql": {"path": "/srv/adapters/sql-7", "digest": "sha256:45f8…", "proved": true}}}
not_declared:
  description: Adapters that are loaded and that the engine's role does not declare. A restart forgets them.
  returned: when one engine is named
  type: list
  elements: str
  sample: []
elapsed:
  description: Seconds.
  returned: when one engine is named
  type: float
  sample: 1.4
timings:
  description: Seconds by step.
  returned: when one engine is named
  type: dict
  sample: {"load": 0.6, "prove": 0.5}
left:
  description: What stood in the way, by engine.
  returned: on failure
  type: dict
  sample: {"chat": {"in_flight": 3, "sessions": 3, "in_use": ["sql"]}}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: adapter-not-changed
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._change import CHANGE, run_adapters
from ansible_collections.baremetal.vllm.plugins.module_utils._glue import ONE_OR_MORE
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={
            **CHANGE,
            "adapters": {
                "type": "list",
                "elements": "dict",
                "options": {
                    "name": {"type": "str", "required": True},
                    "path": {"type": "str", "required": True},
                    "base": {"type": "str", "default": ""},
                    "prove": {"type": "bool", "default": True},
                },
            },
            "state": {"type": "str", "choices": ["present", "exact"], "default": "present"},
        },
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    run_adapters(module, progress)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
