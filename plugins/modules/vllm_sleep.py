#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_sleep
short_description: Put a vLLM engine to sleep, proved by the memory that it frees
version_added: 0.1.0
description:
  - The engine is drained first, so no request is cut. Then it sleeps at O(level), or frees its KV cache alone with
    O(kv_only).
  - An answer of the engine proves nothing, since it says the same when nothing happens. The GPU memory before and after
    decides, and the level is recorded on the host.
  - After a time-out or an error of the engine its state is V(unknown), and it stays out of rotation.
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
    support: full
    details: A prediction from reads alone.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  level:
    description:
      - V(1) keeps the weights in host memory, V(2) drops them, V(0) only stops taking requests.
    type: int
    choices: [0, 1, 2]
    default: 1
  kv_only:
    description:
      - Free the KV cache and keep the weights on the GPU. O(level) is not used then.
    type: bool
    default: false
  deepen:
    description:
      - What happens to an engine that sleeps at another level. V(true) wakes it and puts it to sleep again, without
        serving in between; V(false) refuses.
    type: bool
    default: true
  max_resident_mib:
    description:
      - The most that the engine may hold on each GPU while asleep. More is a failure.
    type: int
  host_copy_mib:
    description:
      - MiB of host memory that the copy of the weights takes at O(level=1), on all GPUs of the engine together. By
        default the size that the engine itself has told at its start, and a third more. The engine keeps that memory
        as long as it runs, so only its first sleep takes it.
      - Without so much available memory, or beyond the unit's own limits, the sleep is refused before the drain begins.
    type: int
  on_failure:
    description:
      - What happens when the engine does not fall asleep as it should, after it was drained.
      - V(fail) is a failure, with the engine out of rotation in whatever state it is.
      - V(stop) stops its unit, so that its GPU memory is free in any case, and tells why in RV(recovered_from).
        M(baremetal.vllm.vllm_wake) of the same lease starts it again.
    type: str
    choices: [fail, stop]
    default: fail
  mode:
    description:
      - What happens to requests that are still in flight at the time-out.
      - V(wait) fails and leaves them running, with the engine withdrawn.
      - V(abort) cuts them and counts them in RV(requests_cut).
      - V(keep) freezes them and counts them in RV(requests_kept), until the engine is awake again. Only O(level=0)
        leaves them the KV cache that they need; other levels are refused.
    type: str
    choices: [wait, abort, keep]
    default: wait
seealso:
  - module: baremetal.vllm.vllm_wake
  - module: baremetal.vllm.vllm_drain
"""

EXAMPLES = r"""
- name: Free the GPU for the night, keep the weights in host memory
  baremetal.vllm.vllm_sleep:
    engine: chat
    level: 1
    max_resident_mib: 2048
    lease:
      owner: night
      reason: batch jobs use this GPU
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
  sample: ["chat: close the gate for new requests", "chat: put it to sleep"]
engines:
  description:
    - The result of each engine, by name, with the keys C(changed), C(actions), C(before), C(after), C(elapsed) and
      C(timings); after a failure also C(left).
  returned: always
  type: dict
before:
  description: The state before, for O(engine). Unseen values are null.
  returned: when one engine is named
  type: dict
  sample: {"state": "serving", "level": null, "admission": "open", "proved": true, "paused": false, "lease": null}
after:
  description: The state after, observed anew; in check mode the predicted one.
  returned: when one engine is named
  type: dict
  sample: {"state": "asleep", "level": 1, "admission": "closed", "proved": true, "paused": true, "lease": "night"}
admission_backend:
  description:
    - Whose word admission is, V(gate), V(haproxy) or V(command); with V(none) the engine alone was asked.
  returned: when one engine is named
  type: str
  sample: gate
elapsed:
  description: Seconds.
  returned: when one engine is named
  type: float
  sample: 5.2
timings:
  description: Seconds by step.
  returned: when one engine is named
  type: dict
  sample: {"withdraw": 0.01, "await_router": 3.0, "await_idle": 1.9, "close": 0.01, "sleep": 0.4}
steps:
  description: Each step in its order, with C(seconds) and, in seconds since the epoch, the time C(at) which it ended.
  returned: when one engine is named, not in check mode
  type: list
  elements: dict
  sample: [{"step": "lease", "seconds": 0.002, "at": 1764460800.113}]
withdrawn_again:
  description: How often, during a drain, a balancer had to be told again, since a reload or restart had forgotten it.
  returned: when that happened
  type: int
requests_cut:
  description: Requests that O(mode=abort) cut.
  returned: when requests were cut
  type: int
requests_kept:
  description: Requests that O(mode=keep) froze.
  returned: when requests were frozen
  type: int
recovered_from:
  description: The failure that O(on_failure=stop) has made good by stopping the unit.
  returned: when it was stopped for that
  type: str
freed_mib:
  description: MiB that the engine gave back, by GPU UUID. Empty where no GPU can be seen, and then nothing is proved.
  returned: when the engine was put to sleep
  type: dict
resident_mib:
  description: MiB that the engine still holds, by GPU UUID.
  returned: when the engine was put to sleep
  type: dict
out_of_service:
  description:
    - What the released lease had held, since when (seconds since the epoch), for how many seconds, with the seconds of
      every step under it (C(timings), and C(steps) with the end of each), what it holds on each GPU at the end
      (C(gpu_mib)), and the record of the last proved start.
  returned: when a lease was released
  type: dict
left:
  description: What stood in the way, by engine.
  returned: on failure
  type: dict
  sample: {"chat": {"running": 2, "waiting": 0, "sessions": 2}}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: sleep-residue
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._change import CHANGE, run_change
from ansible_collections.baremetal.vllm.plugins.module_utils._glue import ONE_OR_MORE
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={
            **CHANGE,
            "level": {"type": "int", "choices": [0, 1, 2], "default": 1},
            "kv_only": {"type": "bool", "default": False},
            "deepen": {"type": "bool", "default": True},
            "max_resident_mib": {"type": "int"},
            "host_copy_mib": {"type": "int"},
            "on_failure": {"type": "str", "choices": ["fail", "stop"], "default": "fail"},
            "mode": {"type": "str", "choices": ["wait", "abort", "keep"], "default": "wait"},
        },
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    run_change(module, "asleep", progress)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
