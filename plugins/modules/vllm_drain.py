#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_drain
short_description: Take a vLLM engine out of service without losing a request, or put it back
version_added: 0.1.0
description:
  - With O(state=drained) the engine is withdrawn at its gate, so that the router stops sending; the requests in flight
    finish; the gate is closed and the engine paused. A drain is proved by several readings of the gate's sessions and
    the engine's gauges, not by a status code.
  - With O(state=serving) a drained engine is resumed, proved by its golden (M(baremetal.vllm.vllm_golden)) or, without
    one, by a completion, and admitted again. A stopped or sleeping engine is not started or woken.
  - A headless engine of a group has no requests of its own, so O(state=drained) leaves it alone. O(state=serving)
    releases the lease under which it was started, once whoever asks for that has proved its head.
  - A drained engine stays drained, over restarts of the engine, the gate and the host, until O(state=serving).
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
    details: A prediction from reads alone. Whether the requests in flight will finish in time cannot be known.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  state:
    description:
      - V(drained) is out of rotation, with nothing in flight, gate closed and, where the engine has development
        endpoints, paused.
      - V(serving) is admitted, with C(/ready) answering 200.
    type: str
    choices: [drained, serving]
    default: drained
  mode:
    description:
      - What happens to requests that are still in flight at the time-out.
      - V(wait) fails and leaves them running, with the engine withdrawn.
      - V(abort) cuts them and counts them in RV(requests_cut).
      - V(keep) freezes them and counts them in RV(requests_kept). They go on after O(state=serving), if their clients
        and the time-outs on the way have so much patience. Such an engine is V(draining) and paused, not V(drained); a
        stop or a sleep lets them finish first.
    type: str
    choices: [wait, abort, keep]
    default: wait
seealso:
  - module: baremetal.vllm.vllm_engine
  - module: baremetal.vllm.vllm_info
"""

EXAMPLES = r"""
- name: Take an engine out of service
  baremetal.vllm.vllm_drain:
    engine: chat
    timeout: 600
    lease:
      owner: night-shift
      reason: replacing a fan
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python

- name: Put it back
  baremetal.vllm.vllm_drain:
    engine: chat
    state: serving
    lease:
      owner: night-shift
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
  sample: ["chat: take the lease", "chat: withdraw it at the gate"]
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
  sample: {"state": "drained", "level": null, "admission": "closed", "proved": true, "paused": true, "lease": "me"}
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
  sample: {"withdraw": 0.01, "await_router": 3.0, "await_idle": 1.9, "close": 0.01, "pause": 0.02}
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
proof:
  description:
    - What proved the engine. C(by) is V(golden), with its C(key), what it was C(compared_by), how many C(positions)
      were compared, and the largest C(distance); or V(completion), with C(why) it was no golden.
  returned: when the engine was proved
  type: dict
  sample:
    by: golden
    key: base-4f1c0a9b3d2e5f60718a
    compared_by: logprobs
    positions: 48
    distance: 0.0
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
  sample: drain-timeout
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
            "state": {"type": "str", "choices": ["drained", "serving"], "default": "drained"},
            "mode": {"type": "str", "choices": ["wait", "abort", "keep"], "default": "wait"},
        },
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    run_change(module, module.params["state"], progress)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
