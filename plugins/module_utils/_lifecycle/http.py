# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The collection's one HTTP client: httpx without proxies, with explicit time-outs and typed failures."""

from __future__ import annotations

import json
import time
import traceback
import typing as t

from .errors import Answered, MissingLibrary, Surprise, Unreachable

try:
    import httpx
except ImportError:
    httpx = None  # type: ignore[assignment]
    HTTPX_IMPORT_ERROR = traceback.format_exc()
else:
    HTTPX_IMPORT_ERROR = ""

Params = t.Mapping[str, t.Union[str, int]]
# An answer of an engine's control endpoint is small; /metrics of a busy engine is some 100 kB.
MAX_BODY = 16 * 1024 * 1024


class Answer(t.NamedTuple):
    """A whole HTTP answer."""

    url: str
    status: int
    text: str

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json_object(self) -> dict[str, t.Any]:
        """The body as a JSON object.

        :raises Answered: the status is not 2xx.
        :raises Surprise: the body is no JSON object.
        """
        if not self.ok:
            raise Answered(self.url, self.status, self.text)
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Surprise(
                f"{self.url} answered HTTP {self.status} with no JSON object: {self.text[:120]!r}",
                entry="answer-unusable",
            )
        return value


class Client:
    """Speaks to one server, over a Unix socket where ``uds`` is given. No proxy variable reaches it."""

    def __init__(self, base: str, *, uds: str | None = None, headers: dict[str, str] | None = None) -> None:
        if httpx is None:
            raise MissingLibrary("httpx", HTTPX_IMPORT_ERROR)
        self._label = f"{uds}:" if uds else base
        # Without TLS no certificates are read, which would take more time than all questions to an engine.
        # Each exchange has its own connection: one kept from an earlier exchange may be closed by its server (vLLM does
        # so after 5 s) just as the next request is sent, and would pass for an engine that drops requests.
        transport = httpx.HTTPTransport(
            uds=uds, retries=0, verify=base.startswith("https:"), limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._client = httpx.Client(transport=transport, base_url=base, trust_env=False, headers=headers)

    def close(self) -> None:
        self._client.close()

    def request(
        self, method: str, path: str, *, timeout: float, params: Params | None = None, body: t.Any = None
    ) -> Answer:
        """One exchange, whatever its status, within ``timeout`` seconds in all.

        :raises Unreachable: refused, timed out, dropped, or an answer that is no HTTP.
        """
        query = "?" + "&".join(f"{key}={value}" for key, value in params.items()) if params else ""
        url = f"{self._label}{path}{query}"
        ends = time.monotonic() + timeout
        try:
            with self._client.stream(
                method, path, params=params, json=body, timeout=httpx.Timeout(max(timeout, 0.05))
            ) as response:
                chunks: list[bytes] = []
                size = 0
                # httpx bounds each read, not the whole: a slow drip must not outlast the deadline.
                for chunk in response.iter_bytes():
                    chunks.append(chunk)
                    size += len(chunk)
                    if time.monotonic() > ends:
                        raise Unreachable(url, "timeout", f"the body was not complete after {timeout:g} s")
                    if size > MAX_BODY:
                        raise Unreachable(url, "dropped", f"the body is larger than {MAX_BODY} bytes")
                return Answer(url, response.status_code, b"".join(chunks).decode("utf-8", "replace"))
        except httpx.TimeoutException as exc:
            raise Unreachable(url, "timeout", f"nothing came within {timeout:g} s") from exc
        except httpx.ConnectError as exc:
            raise Unreachable(url, "refused", str(exc)) from exc
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL, UnicodeError) as exc:
            raise Unreachable(url, "dropped", str(exc) or type(exc).__name__) from exc
