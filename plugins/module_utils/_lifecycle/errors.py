# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Errors of the lifecycle library: a sentence that stands alone, and the keys that go with it.

Each names its entry in docs/runbook.md, which says more than a message can.
"""

from __future__ import annotations

import typing as t


class LifecycleError(Exception):
    """A message that names what was found, and details for the module result. The change has failed.

    :param entry: the heading in docs/runbook.md that says what to do about it.
    """

    exit_code = 1

    def __init__(self, msg: str, *, entry: str, next_step: str = "", **details: t.Any) -> None:
        super().__init__(msg)
        self.entry = entry
        self.next_step = next_step
        self.details: dict[str, t.Any] = details

    @property
    def text(self) -> str:
        """The message, what to do next and where to read more: what a person reads in a terminal."""
        return f"{self}. Next: {self.next_step} {self.reference}" if self.next_step else f"{self} {self.reference}"

    @property
    def reference(self) -> str:
        return f"(runbook: {self.entry})"


class UsageError(LifecycleError):
    """Options or files on the host are wrong; nothing was touched."""

    exit_code = 2


class MissingLibrary(UsageError):
    """A Python library is absent from the interpreter that runs this."""

    def __init__(self, library: str, import_error: str) -> None:
        super().__init__(
            f"the Python library {library} is missing",
            entry="library-missing",
            next_step="run the role baremetal.vllm.vllm_host on this host, and let the task use its control venv "
            "(ansible_python_interpreter: /opt/vllm/control/bin/python)",
        )
        self.library = library
        self.import_error = import_error


class Unwritable(LifecycleError):
    """A file of ours cannot be written. It says nothing of the engine, so nothing is done to the engine for it."""


class UnknownState(LifecycleError):
    """The signals are missing or contradict each other, so no change is safe."""

    exit_code = 3


class DeadlineExceeded(LifecycleError):
    """The deadline came before the wanted state."""

    exit_code = 4


class Refused(LifecycleError):
    """The change is possible but not allowed now: another one's lease, too little capacity or memory."""

    exit_code = 5


class Unreachable(LifecycleError):
    """No answer at all. ``kind`` is refused, timeout or dropped."""

    def __init__(self, url: str, kind: str, reason: str) -> None:
        super().__init__(f"{url} gave no answer ({kind}): {reason}", entry="engine-no-answer", http_url=url)
        self.kind = kind


class AdmissionDown(LifecycleError):
    """Whoever admits requests to an engine, its gate or a balancer, gave no answer."""


class Answered(LifecycleError):
    """An answer that says no."""

    def __init__(self, url: str, status: int, body: str) -> None:
        text = " ".join(body[:200].split()) or "no body"
        super().__init__(
            f"{url} answered HTTP {status}: {text}", entry="engine-error", http_url=url, http_status=status
        )
        self.status = status


class Surprise(LifecycleError):
    """An answer that says yes, or says nothing we can read, while another signal shows something else."""


class Mismatch(Surprise):
    """An engine answers, and not what it ought to: other weights, stale caches, or no weights at all."""
