# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's fleet as tests see it: plays run as a user runs them, hosts looked at by ssh without our modules."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

CHECKOUT = Path(__file__).resolve().parents[2]
LAB = CHECKOUT / "tests/lab/lab"
CONTROL = "/opt/vllm/control/bin/python"
PORTS = {"chat": 8001, "code": 8002}


class Fleet:
    """The lab of that name; ``more`` are inventories that come after the lab's own."""

    def __init__(self, name: str, *more: Path) -> None:
        self.name = name
        self.more = more
        self.inventory = Path(self.lab("inventory", "--path").strip())
        groups = json.loads(self.inventory.read_text())["all"]["children"]
        self.address = {
            host: values["ansible_host"] for group in groups.values() for host, values in group["hosts"].items()
        }
        self.engines = sorted(groups["vllm_engines"]["hosts"])
        self.bin = Path(sys.executable).parent
        self.router = f"http://{self.address['r1']}:8000"

    def lab(self, verb: str, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [LAB, verb, "--name", self.name, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert not check or done.returncode == 0, f"lab {verb}: {done.stdout}{done.stderr}"
        return done.stdout

    def ssh(self, host: str, command: str, check: bool = True) -> str:
        return self.lab("ssh", host, command, check=check)

    def kill(self, host: str) -> None:
        self.lab("kill", host)

    def boot(self, host: str) -> None:
        self.lab("boot", host)

    def runs(self, host: str) -> bool:
        made = json.loads(subprocess.run([LAB, "status", "--json"], capture_output=True, check=True, timeout=60).stdout)
        return next(lab["hosts"][host]["running"] for lab in made if lab["name"] == self.name)

    def gate(self, host: str, engine: str = "chat") -> str:
        return f"http://{self.address[host]}:{PORTS[engine]}"

    # Looks that use none of our code on the host.

    def engine_get(self, host: str, path: str, engine: str = "chat") -> dict:
        ask = f"curl -s --max-time 5 --unix-socket /run/vllm/{engine}/engine.sock http://engine{path}"
        return json.loads(self.ssh(host, ask))

    def ready(self, host: str, engine: str = "chat") -> int:
        """The status of /ready, 0 where the gate gives no answer."""
        try:
            return httpx.get(f"{self.gate(host, engine)}/ready", timeout=5, trust_env=False).status_code
        except httpx.HTTPError:
            return 0

    def main_pid(self, host: str, engine: str = "chat") -> int:
        return int(self.ssh(host, f"systemctl show --value --property MainPID vllm-engine@{engine}.service"))

    def active(self, host: str, engine: str = "chat") -> str:
        return self.ssh(host, f"systemctl is-active vllm-engine@{engine}.service", check=False).strip()

    def lease(self, host: str, engine: str = "chat") -> dict | None:
        text = self.ssh(host, f"cat /var/lib/vllm/{engine}/lease.json 2>/dev/null || true")
        return json.loads(text) if text.strip() else None

    @contextlib.contextmanager
    def whole(self):
        """Every engine serves, held by nobody, when this begins and when it ends."""
        for host in self.engines:
            assert self.ready(host) == 200, f"{host} does not serve before this test"
            assert self.lease(host) is None
        yield
        for host in self.engines:
            self.wait(f"{host} serves after this test", lambda host=host: self.ready(host) == 200, 60)
            assert self.lease(host) is None

    def wait(self, what: str, test, seconds: float = 120) -> None:
        ends = time.monotonic() + seconds
        while not test():
            assert time.monotonic() < ends, f"{what}: not after {seconds:g} s"
            time.sleep(0.3)

    def inventories(self) -> list[Path]:
        return [self.inventory, CHECKOUT / "tests/lab/inventory", *self.more]

    # Plays and modules, as a user runs them.

    def _ansible(self, command: str, *arguments: str) -> list[str]:
        return [
            str(self.bin / command),
            *(f"--inventory={path}" for path in self.inventories()),
            *arguments,
        ]

    def _environment(self) -> dict[str, str]:
        # A user's environment: what molecule sets for its own plays does not reach ours.
        own = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        return {**own, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}

    def play(self, name: str, *arguments: str, rc: int | None = 0, **variables) -> str:
        done = self.begin(name, *arguments, **variables)
        output = done.communicate(timeout=900)[0]
        assert rc is None or done.returncode == rc, output[-6000:]
        return output

    def begin(self, name: str, *arguments: str, **variables) -> subprocess.Popen[str]:
        extra = ["--extra-vars", json.dumps(variables)] if variables else []
        return subprocess.Popen(
            self._ansible("ansible-playbook", f"{CHECKOUT}/playbooks/{name}", *arguments, *extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(),
            cwd=CHECKOUT,
        )

    def module(self, host: str, module: str, *, check: bool = False, **options) -> dict:
        """The result of one module call on one host, failed or not."""
        done = subprocess.run(
            self._ansible(
                "ansible",
                host,
                f"--module-name=baremetal.vllm.{module}",
                f"--args={json.dumps(options)}",
                f"--extra-vars=ansible_python_interpreter={CONTROL}",
                *(["--check", "--diff"] if check else ["--diff"]),
            ),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=CHECKOUT,
            env={**self._environment(), "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal",
                 "ANSIBLE_CALLBACK_RESULT_FORMAT": "json", "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1"},
        )  # fmt: skip
        start = done.stdout.find("{", done.stdout.find(f"{host} | "))
        assert start >= 0, done.stdout + done.stderr
        result = json.JSONDecoder().raw_decode(done.stdout[start:])[0]
        return {"failed": f"{host} | FAILED" in done.stdout, **result}


class Stream(threading.Thread):
    """One streaming completion, and what came of it."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.max_tokens = url, max_tokens
        self.tokens = 0
        self.finish_reason: str | None = None
        self.status = 0
        self.error = ""
        self.first = threading.Event()
        self.start()

    def run(self) -> None:
        body = {
            "model": "tiny", "prompt": "The engine", "max_tokens": self.max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=300, trust_env=False
            ) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    choice = json.loads(line[6:])["choices"][0]
                    self.tokens += len(choice.get("token_ids") or [])
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                    self.first.set()
        except (httpx.HTTPError, KeyError, IndexError) as exc:
            self.error = repr(exc)
        self.first.set()

    def whole(self) -> bool:
        self.join(300)
        return self.finish_reason == "length" and self.tokens == self.max_tokens

    def __repr__(self) -> str:
        return f"<{self.tokens}/{self.max_tokens} tokens, {self.finish_reason}, HTTP {self.status} {self.error}>"
