# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How many engines of a fleet serve: their gates' /ready, asked as a router asks it."""

from __future__ import annotations

import typing as t
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from .deadline import Deadline
from .errors import LifecycleError, Refused, UsageError
from .http import Client

ASK_TIMEOUT = 5.0
# Enough to ask a large fleet in one or two rounds of time-outs without a thread for each host.
WORKERS = 64


def ask(url: str) -> str:
    """Nothing when the gate is ready, else what it said."""
    client = Client(url)
    try:
        status = client.request("GET", "/ready", timeout=ASK_TIMEOUT).status
    except LifecycleError as exc:
        return str(exc)
    finally:
        client.close()
    return "" if status == 200 else f"/ready is {status}"


def _is_url(value: t.Any) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        return False


def await_serving(endpoints: dict[str, str], min_serving: int, timeout: float) -> dict[str, t.Any]:
    """Wait until enough gates are ready.

    :raises UsageError: more are wanted than there are, or an endpoint is no URL.
    :raises Refused: too few at the deadline; names those that do not serve.
    """
    if not 0 <= min_serving <= len(endpoints):
        raise UsageError(
            f"min_serving is {min_serving}, yet {len(endpoints)} engine(s) are left to serve",
            next_step="lower min_serving, or the batch",
        )
    for name, url in endpoints.items():
        if not _is_url(url):
            raise UsageError(f"endpoint {name} is {url!r}, which is no URL", next_step="use http://ADDRESS:PORT")
    deadline = Deadline(timeout)
    while True:
        with ThreadPoolExecutor(max_workers=WORKERS) as pool:
            answers = dict(zip(endpoints, pool.map(ask, endpoints.values())))
        serving = [name for name, answer in answers.items() if not answer]
        left = {name: answer for name, answer in answers.items() if answer}
        result = {"serving": serving, "left": left, "elapsed": round(deadline.elapsed, 3)}
        if len(serving) >= min_serving:
            return result
        if not deadline.rest(1.0):
            raise Refused(
                f"{len(serving)} of {len(endpoints)} other engine(s) serve, {min_serving} must: "
                + "; ".join(f"{name}: {answer}" for name, answer in left.items()),
                next_step="bring those back first (playbooks/status.yml shows them), or lower min_serving",
                **result,
            )
