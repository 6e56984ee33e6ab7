# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the engine's client reads beside HTTP."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import http
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import environment


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('VLLM_API_KEY="plain"', "plain"),
        ("VLLM_API_KEY=bare", "bare"),
        ("VLLM_API_KEY='single'", "single"),
        (r'VLLM_API_KEY="a\"b\\c\`d\$e=f"', 'a"b\\c`d$e=f'),
        ("OTHER_VLLM_API_KEY=no", ""),
    ],
)
def test_the_api_key_is_read_as_systemd_reads_it(tmp_path, line, key):
    path = tmp_path / "chat.env"
    path.write_text(f"# settings\nHOME=/x\n{line}\n")
    assert environment(path, "VLLM_API_KEY") == key


def test_no_environment_file_is_no_key(tmp_path):
    assert environment(tmp_path / "none", "VLLM_API_KEY") == ""


def test_a_server_that_ends_an_idle_connection_is_not_taken_for_one_that_drops_requests():
    """uvicorn closes a kept connection after 5 s: when the next request is already on its way, it gets no answer."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()

        def serve():
            for _unused in range(3):
                connection = listener.accept()[0]
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    connection.recv(4096)  # a second request on this connection would be lost

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = http.Client("http://engine", uds=f"{folder}/s")
        try:
            answers = [client.request("GET", "/health", timeout=5).text for _unused in range(3)]
        finally:
            client.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
    assert answers == ["ok"] * 3
