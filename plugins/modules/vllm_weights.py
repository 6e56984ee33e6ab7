#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_weights
short_description: Record what a checkpoint's files hold, or find out whether they still hold it
version_added: 0.1.0
description:
  - Takes a manifest of a checkpoint on disk. Its digest covers the content of every file, and is the same on every host
    that has the same files, wherever they lie.
  - vLLM and its preload daemon tell checkpoints apart by names, types and shapes of their tensors, and serve the old
    values of another checkpoint with equal shapes without a warning. The manifest tells them apart.
  - All files count, at any depth, except names that begin with a dot and C(lost+found). Links are followed; one that
    leads out of the checkpoint is part of the manifest, as written. In a snapshot of a Hugging Face cache the links to
    the blobs of that cache count as the files themselves.
  - Hashes on all cores, at idle priority for CPU and disk, and holds no lock that an engine's change waits for. What
    was hashed is remembered by device, inode, size, mtime and ctime, so that a second run reads no content.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common.attributes
  - baremetal.vllm._common.long
attributes:
  check_mode:
    support: full
    details: It hashes the files and writes nothing. So what it hashed is not remembered either, and the next run does
      it again.
  diff_mode:
    support: full
    details: Shows the digests, and of the files those that differ from the recorded manifest.
  idempotent:
    support: full
options:
  path:
    description:
      - The checkpoint, as an absolute path to its directory, or to its file where it is a single one.
    type: path
    required: true
  state:
    description:
      - With V(recorded) the manifest is kept on the host as the one that this path is to have. A changed checkpoint is
        recorded anew, and reported as changed.
      - With V(matching) nothing is changed. The task fails when the files do not match the recorded manifest, and names
        both digests and the files that differ. Where nothing was recorded, O(allowed) or O(allowed_file) is needed.
    type: str
    choices: [recorded, matching]
    default: recorded
  method:
    description:
      - With V(full) every byte of every file counts.
      - With V(sample) the header and some blocks of every tensor of the safetensors files count, and other files in
        full. It takes seconds instead of minutes for large checkpoints. It finds another training, revision or
        quantisation, a swapped or truncated file, and in a tensor every changed stretch that is longer than a quarter
        of it or than 32 MiB. It can miss a few changed values, so it is no guard against a failing disk, nor against
        someone who chooses what to change.
      - The method is part of the digest. Manifests of different methods are not compared.
      - Without it the method of the recorded manifest, and V(full) where nothing was recorded.
    type: str
    choices: [full, sample]
  user:
    description:
      - The user of the service, who must be able to read every file. The task fails when it cannot.
    type: str
    default: ""
  allowed:
    description:
      - The digests that are allowed, each V(sha256:) and 64 hex digits. The task fails, and records nothing, when that
        of the files is neither in this list nor in O(allowed_file). Without both, all are allowed.
    type: list
    elements: str
    default: []
  allowed_file:
    description:
      - A file on the host with an allowed digest on each line, outside of the checkpoint. What follows the digest is a
        comment.
    type: path
  allowed_signers:
    description:
      - A file on the host as C(ssh-keygen) describes it under ALLOWED SIGNERS. One of those in it must have signed
        O(allowed_file) in the namespace V(vllm-weights); the signature lies beside that file, named like it with
        C(.sig) appended.
      - Needs C(ssh-keygen) on the host.
    type: path
  timeout:
    description:
      - Seconds for all of it. Running out is a failure that names the files that are left. Those that are done by then
        are remembered, except in check mode.
    type: float
    default: 3600.0
seealso:
  - module: baremetal.vllm.vllm_preload
"""

EXAMPLES = r"""
- name: Write down what the checkpoint holds that was just copied
  baremetal.vllm.vllm_weights:
    path: /srv/models/base
    user: vllm
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python

- name: Stop here unless this is still the checkpoint that was approved
  baremetal.vllm.vllm_weights:
    path: /srv/models/base
    state: matching
    allowed_file: /etc/vllm/approved.txt  # signed by ssh-keygen -Y sign -n vllm-weights -f KEY approved.txt
    allowed_signers: /etc/vllm/approvers
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
changed:
  description: Whether a manifest was recorded, or in check mode would be.
  returned: always
  type: bool
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
  sample: ["/srv/models/base: record sha256:45f8… (full, 12 files)"]
checkpoint:
  description: Where it lies.
  returned: always
  type: str
  sample: /srv/models/base
digest:
  description: The digest of what is on disk.
  returned: when the files could be read
  type: str
  sample: sha256:45f87ec0a567023b0a4e98717a494187e5c2b39e398e4e76b56ac97d159007fe
method:
  description: How it was taken.
  returned: when the files could be read
  type: str
  sample: full
bytes:
  description: The size of the weight files that a loader reads, without tokenizer and configuration.
  returned: when the files could be read
  type: int
  sample: 13893632000
hashed:
  description: How many bytes were read to take the digest. 0 when everything was remembered.
  returned: when the files could be read
  type: int
  sample: 0
files:
  description: How each file that differs from the recorded manifest does so.
  returned: when the files could be read
  type: dict
  sample: {"model-00001-of-00003.safetensors": "has the content of model-00002-of-00003.safetensors"}
before:
  description: The recorded manifest before, empty without one.
  returned: always
  type: dict
  sample: {}
after:
  description: The recorded manifest after, in check mode the predicted one.
  returned: success
  type: dict
  sample: {"digest": "sha256:45f8…", "method": "full", "bytes": 13893632000}
elapsed:
  description: Seconds.
  returned: always
  type: float
unreadable:
  description: The file or directory that could not be read.
  returned: when something could not be read
  type: str
  sample: /srv/models/base/model-00001-of-00003.safetensors
user:
  description: Who could not read it.
  returned: when something could not be read
  type: str
  sample: vllm
left:
  description: The files that were not hashed yet.
  returned: when the time-out came
  type: dict
  sample: {"files": ["model-00003-of-00003.safetensors"]}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: weights-mismatch
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._glue import fail, refuse_option
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside, weights
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["recorded", "matching"], "default": "recorded"},
            "method": {"type": "str", "choices": ["full", "sample"]},
            "user": {"type": "str", "default": ""},
            "allowed": {"type": "list", "elements": "str", "default": []},
            "allowed_file": {"type": "path"},
            "allowed_signers": {"type": "path"},
            "timeout": {"type": "float", "default": 3600.0},
        },
        required_by={"allowed_signers": "allowed_file"},
        supports_check_mode=True,
    )
    params = module.params
    if not 0 < params["timeout"] < 1e9:
        refuse_option(module, f"timeout must be above 0, not {params['timeout']:g}")
    try:
        result = weights.bring(
            params["path"],
            params["state"],
            method=params["method"] or "",
            user=params["user"],
            timeout=params["timeout"],
            pinned=params["allowed"],
            allowed_file=params["allowed_file"] or "",
            allowed_signers=params["allowed_signers"] or "",
            check=module.check_mode,
            report=progress.about(params["path"]),
        )
    except LifecycleError as exc:
        fail(module, exc, checkpoint=params["path"], changed=False, actions=[], before={})
    module.exit_json(**result)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
