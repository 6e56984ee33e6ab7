# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Calls an operator's own command, which speaks to whatever balances their fleet.

It is called with a verb and the engine's name: withdraw, close and admit act; status and sessions answer a JSON object
and change nothing. It exits with 0 when it has done so, with 3 when its balancer gave no answer; anything else failed.
"""

from __future__ import annotations

import json
import socket
import typing as t

from . import process
from .balancer import Balancer, BalancerDown, Look
from .config import EngineConfig
from .errors import Surprise, UsageError
from .gate import ADMISSIONS

VERBS = {"open": "admit", "withdrawn": "withdraw", "closed": "close"}
NO_ANSWER = 3
# All that it gets: the same from a play, a unit and a terminal. What it has to keep secret is in files of its own.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


class Script(Balancer):
    """The operator's command for one engine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if not self.config.command or not self.config.command[0].startswith("/"):
            raise UsageError(
                f"engine '{config.engine}' has admission command with command {self.config.command}",
                entry="admission-declared",
                next_step="give it a list whose first word is the absolute path of an executable file",
            )

    def tell(self, word: str) -> None:
        self._call(VERBS[word])

    def look(self) -> list[Look]:
        status, sessions = self._answer("status"), self._answer("sessions")
        word, up = status.get("admission"), status.get("up", True)
        count, total = sessions.get("sessions"), sessions.get("total", 0)
        numbers = [isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in (count, total)]
        if word not in ADMISSIONS or not isinstance(up, bool) or not all(numbers):
            raise Surprise(
                f"{self.config.command[0]} says status {status} and sessions {sessions} of engine '{self.engine}'",
                entry="balancer-command",
                next_step=f'status answers {{"admission": {" or ".join(ADMISSIONS)}, "up": true}}, sessions '
                '{"sessions": 0, "total": 0}; up and total may be left out',
            )
        return [Look(self.config.command[0], word, up, t.cast(int, count), t.cast(int, total))]

    def _answer(self, verb: str) -> dict[str, t.Any]:
        text = self._call(verb)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Surprise(
                f"{self.config.command[0]} {verb} {self.engine} answered no JSON object: {text[:200]!r}",
                entry="balancer-command",
                next_step="let it write one JSON object to its standard output, and messages to its standard error",
            )
        return value

    def _call(self, verb: str) -> str:
        """Its standard output.

        :raises BalancerDown: no answer within the time limit, or it says that it had none.
        :raises Surprise: it failed.
        """
        argv = [*self.config.command, verb, self.engine]
        here = f"{self.config.command[0]} {verb} {self.engine} on {socket.gethostname()}"
        try:
            done = process.run_alone(argv, self.config.timeout, env=ENVIRONMENT, cwd="/")
        except OSError as exc:
            raise BalancerDown(
                f"{here} cannot be called: {exc}",
                entry="balancer-command",
                next_step="put the file there, executable for root",
            ) from exc
        except process.TimeoutExpired as exc:
            raise BalancerDown(
                f"{here} did not end within {self.config.timeout:g} s, and was killed; whether it had an effect is "
                "not known",
                entry="balancer-command",
                next_step="raise timeout in the engine's admission, or mend the command; then run this again",
            ) from exc
        if done.returncode == 0:
            return done.stdout
        error = BalancerDown if done.returncode == NO_ANSWER else Surprise
        says = " ".join(done.stderr.split())[-300:] or "nothing on its standard error"
        raise error(
            f"{here} ended with {done.returncode}: {says}",
            entry="balancer-command",
            next_step="call it by hand, as root, with an empty environment, and see that it exits with 0",
        )
