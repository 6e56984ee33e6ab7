# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How many engines of a fleet serve: their gates' /ready, asked as a router asks it, or the HAProxies before them."""

from __future__ import annotations

import typing as t
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from .deadline import Deadline
from .errors import LifecycleError, Refused, UsageError
from .haproxy import NAME, is_address, look
from .http import Client

ASK_TIMEOUT = 5.0
# Enough to ask a large fleet in one or two rounds of time-outs without a thread for each host.
WORKERS = 64
# "uncounted:BACKEND" in the place of a URL: an engine whose balancer only its own host can ask.
UNCOUNTED = "uncounted:"


def ask(url: str) -> str:
    """Nothing when requests are sent to the engine, else why not."""
    if url.startswith(UNCOUNTED):
        backend = url[len(UNCOUNTED) :]
        return f"it has admission {backend}, so nobody but its own host can say whether it serves"
    if url.startswith("haproxy:"):
        return _ask_haproxies(url)
    client = Client(url)
    try:
        status = client.request("GET", "/ready", timeout=ASK_TIMEOUT).status
    except LifecycleError as exc:
        return str(exc)
    finally:
        client.close()
    return "" if status == 200 else f"/ready is {status}"


def _haproxies(url: str) -> tuple[list[str], str, str]:
    """Addresses, proxy and server of haproxy://ADDRESS:PORT,ADDRESS:PORT/PROXY/SERVER.

    :raises ValueError: it is written otherwise.
    """
    addresses, proxy, server = url[len("haproxy://") :].split("/")
    sockets = addresses.split(",")
    if not all(is_address(one) for one in sockets) or not NAME.fullmatch(proxy) or not NAME.fullmatch(server):
        raise ValueError(url)
    return sockets, proxy, server


def _ask_haproxies(url: str) -> str:
    sockets, proxy, server = _haproxies(url)
    for address in sockets:
        try:
            seen = look(address, proxy, server, ASK_TIMEOUT)
        except LifecycleError as exc:
            return str(exc)
        if seen.word != "open" or not seen.up:
            return f"{seen.where} has it {seen.word if seen.word != 'open' else 'down'}"
    return ""


def _is_url(value: t.Any) -> bool:
    try:
        if value.startswith("haproxy://"):
            return bool(_haproxies(value))
        if value.startswith(UNCOUNTED):
            return len(value) > len(UNCOUNTED)
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        return False


def await_serving(endpoints: dict[str, str], min_serving: int, timeout: float) -> dict[str, t.Any]:
    """Wait until enough engines get requests.

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
    uncounted = [name for name, url in endpoints.items() if url.startswith(UNCOUNTED)]
    if min_serving > len(endpoints) - len(uncounted):
        raise Refused(
            f"{min_serving} of {len(endpoints)} other engine(s) must serve, and nobody can be asked about "
            + "; ".join(f"{name}: {ask(endpoints[name])}" for name in uncounted),
            next_step="lower min_serving to what the others give, and look at these with playbooks/status.yml; or let "
            "their HAProxies be asked over TCP",
            serving=[],
            left={name: ask(endpoints[name]) for name in uncounted},
        )
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
