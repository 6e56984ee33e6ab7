# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How many engines of each pool serve: their gates' /ready, asked as a router asks it, or the HAProxies before them."""

from __future__ import annotations

import typing as t
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Answer:
    """Whether requests are sent to an engine: None where nobody has said so. ``why`` not."""

    serves: bool | None
    why: str = ""


@dataclass(frozen=True)
class Pool:
    """Engines of which any may answer a request; ``going`` are about to be taken out. Both are URLs by HOST/ENGINE."""

    name: str
    min_serving: int
    going: t.Mapping[str, str]
    others: t.Mapping[str, str]

    @property
    def title(self) -> str:
        return f"{self.name} without {', '.join(sorted(self.going))}" if self.going else self.name


def ask(url: str) -> Answer:
    """Whether requests are sent to the engine."""
    if url.startswith(UNCOUNTED):
        backend = url[len(UNCOUNTED) :]
        return Answer(None, f"it has admission {backend}, so nobody but its own host can say whether it serves")
    if url.startswith("haproxy:"):
        return _ask_haproxies(url)
    client = Client(url)
    try:
        status = client.request("GET", "/ready", timeout=ASK_TIMEOUT).status
    except LifecycleError as exc:
        return Answer(None, str(exc))
    finally:
        client.close()
    return Answer(True) if status == 200 else Answer(False, f"/ready is {status}")


def _haproxies(url: str) -> tuple[list[str], str, str]:
    """Addresses, proxy and server of haproxy://ADDRESS:PORT,ADDRESS:PORT/PROXY/SERVER.

    :raises ValueError: it is written otherwise.
    """
    addresses, proxy, server = url[len("haproxy://") :].split("/")
    sockets = addresses.split(",")
    if not all(is_address(one) for one in sockets) or not NAME.fullmatch(proxy) or not NAME.fullmatch(server):
        raise ValueError(url)
    return sockets, proxy, server


def _ask_haproxies(url: str) -> Answer:
    sockets, proxy, server = _haproxies(url)
    for address in sockets:
        try:
            seen = look(address, proxy, server, ASK_TIMEOUT)
        except LifecycleError as exc:
            return Answer(None, str(exc))
        if seen.word != "open" or not seen.up:
            return Answer(False, f"{seen.where} has it {seen.word if seen.word != 'open' else 'down'}")
    return Answer(True)


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


def await_serving(pools: t.Sequence[Pool], timeout: float) -> dict[str, t.Any]:
    """Wait until in each pool enough others get requests. All are counted in one look, so they are enough together.

    A pool of which no engine that goes serves is left out: it loses nothing. One that nobody can say that of is not.

    :raises UsageError: more are wanted than there are, or an endpoint is no URL.
    :raises Refused: too few at the deadline; names pool, numbers, those that do not serve, and why.
    """
    for pool in pools:
        for name, url in {**pool.others, **pool.going}.items():
            if not _is_url(url):
                raise UsageError(
                    f"endpoint {name} is {url!r}, which is no URL",
                    entry="option-value",
                    next_step="use http://ADDRESS:PORT",
                )
        if pool.min_serving < 0:
            raise UsageError(
                f"{pool.name}: min_serving is {pool.min_serving}", entry="min-serving", next_step="use a number from 0"
            )
    counted = [pool for pool in pools if pool.min_serving]
    gone = _ask_all({url for pool in counted for url in pool.going.values()})
    counted = [
        pool for pool in counted if not pool.going or any(gone[url].serves is not False for url in pool.going.values())
    ]
    for pool in counted:
        _check(pool)
    deadline = Deadline(timeout)
    while True:
        answers = _ask_all({url for pool in counted for url in pool.others.values()})
        rows = [_row(pool, answers) for pool in counted]
        short = [row for row in rows if len(row["serving"]) < row["min_serving"]]
        if not short:
            return {"pools": rows, "elapsed": round(deadline.elapsed, 3)}
        if not deadline.rest(1.0):
            raise Refused(
                "; and ".join(
                    f"{row['name']}: {len(row['serving'])} of {len(row['serving']) + len(row['left'])} other engine(s) "
                    f"serve, {row['min_serving']} must: "
                    + "; ".join(f"{name}: {why}" for name, why in row["left"].items())
                    for row in short
                ),
                entry="too-few-serving",
                next_step="bring those back first (baremetal.vllm.status shows them), or lower min_serving",
                pools=rows,
                left={name: why for row in short for name, why in row["left"].items()},
                elapsed=round(deadline.elapsed, 3),
            )


def _ask_all(urls: t.Iterable[str]) -> dict[str, Answer]:
    every = sorted(urls)
    with ThreadPoolExecutor(max_workers=WORKERS) as workers:
        return dict(zip(every, workers.map(ask, every)))


def _check(pool: Pool) -> None:
    """Refuse what no waiting could bring."""
    if pool.min_serving > len(pool.others):
        raise UsageError(
            f"{pool.title}: min_serving is {pool.min_serving}, yet {len(pool.others)} engine(s) are left to serve",
            entry="min-serving",
            next_step="lower min_serving, or the batch",
        )
    uncounted = {name: ask(url).why for name, url in pool.others.items() if url.startswith(UNCOUNTED)}
    if pool.min_serving > len(pool.others) - len(uncounted):
        raise Refused(
            f"{pool.title}: {pool.min_serving} of {len(pool.others)} other engine(s) must serve, and nobody can be "
            "asked about " + "; ".join(f"{name}: {why}" for name, why in uncounted.items()),
            entry="too-few-serving",
            next_step="lower min_serving to what the others give, and look at these with baremetal.vllm.status; or let "
            "their HAProxies be asked over TCP",
            pools=[],
            left=uncounted,
        )


def _row(pool: Pool, answers: t.Mapping[str, Answer]) -> dict[str, t.Any]:
    return {
        "name": pool.title,
        "min_serving": pool.min_serving,
        "serving": [name for name, url in pool.others.items() if answers[url].serves],
        "left": {name: answers[url].why for name, url in pool.others.items() if not answers[url].serves},
    }
