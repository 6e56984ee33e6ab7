#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_golden
short_description: Record what a vLLM engine answers when it is right, or find out whether it still does
version_added: 0.1.0
description:
  - A golden is a set of recorded answers - token ids with their log probabilities, or vectors - to fixed prompts at
    temperature 0. It is of a subject, which is the content of the weights (see M(baremetal.vllm.vllm_weights)), the
    runtime's version, the name of the served model, the names of the declared adapters, and dtype with quantisation and
    type of the KV cache. Engines of equal subjects owe equal answers, on every host.
  - Once a golden is on record for an engine, every proof of it goes by that golden, which is at the end of each start,
    each wake, each reload and before each admission. An engine that does not match is not admitted. Without a golden on
    record a completion is the proof, and nothing is hashed.
  - Works for models that complete or chat (C(/v1/completions), C(/v1/chat/completions)), embed (C(/v1/embeddings)),
    rank (C(/v1/rerank), C(/v1/score)), classify or pool. What an engine is for is read from its routes.
  - Compared are token ids and their log probabilities; where the engine gives no log probabilities, token ids alone;
    where it answers with numbers, the vectors. RV(compared_by) says which.
  - A process that a golden has proved is held to that golden as long as it lives, so that a wake cannot bring other
    weights. M(baremetal.vllm.vllm_reload) and a restart take new weights by what lies on disk then.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
  - baremetal.vllm._common.long
  - baremetal.vllm._common.engines
attributes:
  check_mode:
    support: full
    details: Asks the engine for no answer, so it takes for granted that a golden which is on record, or was given,
      matches. RV(would_compare) says what would be compared. The weights are hashed where that is needed, and what was
      hashed is not remembered.
  diff_mode:
    support: full
    details: Shows prompts and answers. In check mode answers that would be recorded anew are not known, and are shown
      as such.
  idempotent:
    support: full
options:
  state:
    description:
      - With V(recorded) the golden is kept on the host, below C(/var/lib/vllm/goldens), for root alone. A first one
        needs two identical answers from an engine that is V(serving), V(withdrawn) or drained without a pause, and
        whose start is proved. Where one is on record, or given by O(golden), the engine has to match it.
      - With V(matching) nothing is changed. The task fails when the engine's answers differ from the golden's, and
        names the prompt, the first position that differs, and both values.
    type: str
    choices: [recorded, matching]
    default: recorded
  golden:
    description:
      - Goldens from elsewhere, as RV(golden) has them. An engine takes the one of its own key, and leaves others alone.
      - With O(state=recorded) it is kept on the host after the engine has matched it, so that a fleet shares one.
      - With O(state=matching) it goes before the one on record. Where none is of the engine's key, and one is of its
        model's name, the task fails and says how the two differ.
    type: list
    elements: dict
    default: []
  prompts:
    description:
      - What to ask. Each is a list of token ids, a text, or a mapping - C(messages) for a chat, or C(query) and
        C(documents) for an engine that ranks. Only engines that generate text chat, and only those that rank take
        documents.
      - Prompts as token ids do not depend on a tokenizer. One of them should have more than 128 tokens, so that a block
        of it is kept in the prefix cache - a stale cache shows nowhere else.
      - Without it the golden's own, and for a first one a long and a short prompt of token ids.
    type: list
    elements: raw
    default: []
  max_tokens:
    description:
      - How many tokens each answer has, from 1 to 1024. Without it as the golden has it, and 8 for a first one.
    type: int
  tolerance:
    description:
      - How far two right answers may lie apart. It is kept with the golden. With O(state=matching) it holds for this
        comparison only.
    type: dict
    default: {}
    suboptions:
      logprobs:
        description:
          - A difference of log probabilities. Without it as the golden has it, and 0.1 for a first one. On one H200 the
            difference was 0 over all sleeps, wakes and restarts; a step of bf16 in a logit from 8 to 16 is 0.0625.
          - Where the recorded answer was a choice between two tokens that were as likely as each other within this
            tolerance, the other token may come, with the log probability that was recorded for it. The comparison of
            that prompt ends there.
        type: float
      vectors:
        description:
          - The length of the difference of two vectors, as a share of the longer one's length. Without it as the golden
            has it, and 0.02 for a first one.
        type: float
  timeout:
    description:
      - Seconds for each engine, with the hashing of its weights where that is needed.
    type: float
    default: 900.0
  force:
    description:
      - Record a golden anew although the engine does not match the one on record. RV(before) and the diff show what is
        replaced. A golden given by O(golden) has to match all the same.
    type: bool
    default: false
seealso:
  - module: baremetal.vllm.vllm_weights
  - module: baremetal.vllm.vllm_wake
  - module: baremetal.vllm.vllm_reload
"""

EXAMPLES = r"""
- name: Write down what this engine answers, which was just found to be right
  baremetal.vllm.vllm_golden:
    engine: chat
  register: recorded
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python

- name: Let the other host's engine match it, and keep it there
  baremetal.vllm.vllm_golden:
    engine: chat
    golden: ["{{ recorded.golden }}"]
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python

- name: Stop here unless every engine computes what it did
  baremetal.vllm.vllm_golden:
    engines: [chat, embed]
    state: matching
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
changed:
  description: Whether a golden was recorded, or in check mode would be.
  returned: always
  type: bool
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
  sample: ["chat: record golden base-4f1c0a9b3d2e5f60718a"]
engines:
  description: The result of each engine, by name, with the keys below.
  returned: always
  type: dict
key:
  description: The key of the engine's subject, which is the name of its golden on every host.
  returned: when one engine is named, and its weights are known
  type: str
  sample: base-4f1c0a9b3d2e5f60718a
subject:
  description: What the golden is of.
  returned: when one engine is named
  type: dict
  sample:
    weights: "sha256:45f8…"
    method: full
    runtime_version: 0.33.0
    served_model: base
    adapters: []
    dtype: auto
golden:
  description: The golden that is on record, or was compared with, for O(golden) on other hosts.
  returned: when one engine is named, and there is one
  type: dict
compared_by:
  description: What a comparison with this golden goes by, which is V(logprobs), V(tokens) or V(vectors).
  returned: when one engine is named
  type: str
  sample: logprobs
tolerance:
  description: What was allowed.
  returned: when one engine is named
  type: dict
  sample: {"logprobs": 0.1, "vectors": 0.02}
positions:
  description: How many tokens, or components of vectors, were compared.
  returned: when answers were compared
  type: int
  sample: 48
distance:
  description: The largest difference that was seen.
  returned: when answers were compared
  type: float
  sample: 0.0
would_compare:
  description: What O(state=matching) would compare.
  returned: in check mode
  type: str
  sample: 2 prompt(s) of golden base-4f1c0a9b3d2e5f60718a, by logprobs
before:
  description: The golden that was on record, empty without one.
  returned: when one engine is named
  type: dict
after:
  description: The golden that is on record, in check mode as far as it can be predicted.
  returned: when one engine is named
  type: dict
mismatch:
  description: The first difference, with C(key), C(prompt), C(position), C(recorded), C(found) and C(compared_by).
  returned: when answers differ
  type: dict
  sample:
    key: base-4f1c0a9b3d2e5f60718a
    prompt: 0
    position: 3
    recorded: {"token": 50, "logprob": -2.9518}
    found: {"token": 0, "logprob": -6.2383}
    compared_by: logprobs
missing:
  description: That there was no golden to compare with.
  returned: when that is why O(state=matching) failed
  type: bool
elapsed:
  description: Seconds.
  returned: when one engine is named
  type: float
timings:
  description: Seconds by part. C(weights) is their hashing, C(ask) the answers.
  returned: when one engine is named
  type: dict
  sample: {"weights": 0.01, "ask": 0.4}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: golden-mismatch
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._change import exit_with
from ansible_collections.baremetal.vllm.plugins.module_utils._glue import (
    ENGINES,
    ONE_OR_MORE,
    chosen_engines,
    fail,
    refuse_option,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside, config, golden, golden_change
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={
            **ENGINES,
            "state": {"type": "str", "choices": ["recorded", "matching"], "default": "recorded"},
            "golden": {"type": "list", "elements": "dict", "default": []},
            "prompts": {"type": "list", "elements": "raw", "default": []},
            "max_tokens": {"type": "int", "no_log": False},
            "tolerance": {
                "type": "dict",
                "default": {},
                "options": {"logprobs": {"type": "float"}, "vectors": {"type": "float"}},
            },
            "timeout": {"type": "float", "default": 900.0},
            "force": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    params = module.params
    if not 0 < params["timeout"] < 1e9:
        refuse_option(module, f"timeout must be above 0, not {params['timeout']:g}")
    if params["max_tokens"] is not None and not 0 < params["max_tokens"] <= golden.MOST_TOKENS:
        refuse_option(module, f"max_tokens must be from 1 to {golden.MOST_TOKENS}")
    tolerance = params["tolerance"] or {}
    wanted = golden_change.Wanted(
        state=params["state"],
        prompts=params["prompts"],
        max_tokens=params["max_tokens"],
        logprobs=tolerance.get("logprobs"),
        vectors=tolerance.get("vectors"),
        goldens=params["golden"],
        timeout=params["timeout"],
        force=params["force"],
    )
    try:
        golden.tolerance(wanted.logprobs, wanted.vectors)
        engines = {name: config.load(name) for name in chosen_engines(module)}
    except LifecycleError as exc:
        fail(module, exc, changed=False)

    def changer(engine: config.EngineConfig):
        return lambda report: golden_change.bring(engine, wanted, check=module.check_mode, report=report)

    exit_with(module, {name: changer(engine) for name, engine in engines.items()}, progress)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
