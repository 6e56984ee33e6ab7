# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A preload daemon and its engine on a real systemd host, written and run by the roles.

The host's `vllm` is the simulator's, and so is its NVML: everything else, systemd and sockets above all, is real. The
tests follow one another on one host; each says in what state it leaves that host for the next.

Needs root and the packages of tests/lab/apt.txt; makes the lab's layer where the cache has none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.sim import model

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")

CHECKOUT = Path(__file__).resolve().parents[2]
LAB = CHECKOUT / "tests/lab/lab"
NAME = "preload"
SUBNET = "10.75.0.0/24"
GPU = "GPU-51e51e00-0000-4000-8000-000000000000"
SOCKET = f"vllm_weight_cache_{hashlib.md5(GPU.encode()).hexdigest()}.sock"
TOKEN = "correct-horse-battery-staple"
ENGINE, DAEMON = "vllm-engine@chat.service", "vllm-preload@base.service"
# /dev/shm is what all services of a host can write to, and it is empty after a boot.
TMPFILES = """
d /dev/shm/sim 0777 - - -
C /dev/shm/sim/ledger 0666 - - - /opt/sim/ledger
"""
SIM = {"SIM_LEDGER": "/dev/shm/sim/ledger", "SIM_ARGS": "--weights-mib 2000 --speed 1000"}
# The runtime's Python has to have what vLLM's has: the door reads the engine's options with it.
RUNTIME = """
set -e
mkdir -p /opt/vllm/runtimes/0.33.0/bin
cd /opt/vllm/runtimes/0.33.0
ln -sf /opt/sim/bin/vllm bin/vllm
printf '#!/bin/sh\\nexec /opt/vllm/runtimes/0.32.0/bin/python "$@"\\n' > bin/python
chmod 755 bin/python
echo '{}' > runtime.json
systemd-tmpfiles --create /etc/tmpfiles.d/sim.conf
ldconfig
"""
PLAY = """
- hosts: vllm_engines
  gather_facts: false
  become: true
  tasks:
    - {ansible.builtin.import_role: {name: baremetal.vllm.vllm_engine, tasks_from: preflight}}
    - {ansible.builtin.import_role: {name: baremetal.vllm.vllm_preload, tasks_from: preflight}}
    - {ansible.builtin.import_role: {name: baremetal.vllm.vllm_host}, tags: [host]}
    - {ansible.builtin.import_role: {name: baremetal.vllm.vllm_preload}}
    - {ansible.builtin.import_role: {name: baremetal.vllm.vllm_engine}}
    - ansible.builtin.debug:
        msg: "lists {{ [vllm_preload_stale, vllm_preload_lost, vllm_engine_stale | default([])] | to_json }}"
      tags: [always]
      when: vllm_preload_stale is defined
"""

# Each state four times: in check mode, for real, again, and again in check mode.
MODULES = """
- hosts: vllm_engines
  gather_facts: false
  become: true
  environment: {SIM_LEDGER: /dev/shm/sim/ledger}
  vars: {ansible_python_interpreter: /opt/vllm/control/bin/python}
  tasks:
    - baremetal.vllm.vllm_preload: {daemon: base, state: ready, timeout: 60}
      register: untouched
    - baremetal.vllm.vllm_preload: {daemon: base, state: absent, timeout: 60}
      register: refused
      failed_when: refused is not failed or 'chat' not in refused.msg
    - baremetal.vllm.vllm_engine: {engine: chat, state: stopped, timeout: 60, lease: {owner: test}}
    - baremetal.vllm.vllm_preload: {daemon: base, state: absent, timeout: 60}
      check_mode: "{{ item }}"
      loop: [true, false, false, true]
      register: absent
    - ansible.builtin.command: systemctl is-active vllm-preload@base
      register: active
      changed_when: false
      failed_when: active.stdout != 'inactive'
    - baremetal.vllm.vllm_preload: {daemon: base, state: ready, timeout: 60}
      check_mode: "{{ item }}"
      loop: [true, false, false, true]
      register: ready
    - ansible.builtin.uri: {url: "http://127.0.0.1:8101/health"}
    - baremetal.vllm.vllm_engine: {engine: chat, state: started, timeout: 60, lease: {owner: test}}
    - ansible.builtin.assert:
        that:
          - untouched is not changed
          - absent.results | map(attribute='changed') | list == [true, true, false, false]
          - ready.results | map(attribute='changed') | list == [true, true, false, false]
"""


class Host:
    """One host of a lab of its own, whose vLLM and NVML are the simulator's."""

    def __init__(self, top: Path, name: str = NAME, subnet: str = SUBNET) -> None:
        self.top = top
        self.name = name
        self.subnet = subnet
        self.printed = ""
        (top / "play.yml").write_text(PLAY)
        (top / "modules.yml").write_text(MODULES)

    def lab(self, *arguments: str, check: bool = True) -> str:
        verb, *rest = arguments
        done = subprocess.run(
            [LAB, verb, "--name", self.name, *rest], capture_output=True, text=True, timeout=300, check=False
        )
        assert not check or done.returncode == 0, f"lab {verb}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def ssh(self, command: str, check: bool = True) -> str:
        return self.lab("ssh", "e1", command, check=check)

    def copy(self, source: Path, target: str) -> None:
        archive = subprocess.run(
            ["tar", "-C", source, "--exclude=__pycache__", "-c", "."], check=True, capture_output=True
        )
        subprocess.run(
            [LAB, "ssh", "--name", self.name, "e1", f"mkdir -p {target} && tar -C {target} -x --no-same-owner"],
            input=archive.stdout, check=True, timeout=60,
        )  # fmt: skip

    def play(self, *arguments: str, rc: int = 0, book: str = "play.yml", **variables) -> Played:
        value = {
            "vllm_host_wheelhouse": "/srv/wheelhouse/control",
            "vllm_runtime_version": "0.33.0",
            "vllm_engine_drain_timeout": 20,
            "vllm_engine_shutdown_timeout": 2,
            "vllm_engine_start_timeout": 60,
            "vllm_engine_instances": [engine()],
            "vllm_preload_start_timeout": 60,
            "vllm_preload_instances": [daemon()],
            **variables,
        }
        (self.top / "vars.json").write_text(json.dumps(value))
        own = {name: text for name, text in os.environ.items() if not name.startswith("ANSIBLE_")}
        inventory = self.lab("inventory", "--path")
        done = subprocess.run(
            [Path(sys.executable).parent / "ansible-playbook", "--inventory", inventory, "--diff", "-v",
             "--extra-vars", f"@{self.top / 'vars.json'}", *arguments, self.top / book],
            env={**own, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False, cwd=CHECKOUT,
        )  # fmt: skip
        self.printed += done.stdout
        assert done.returncode == rc, done.stdout[-8000:]
        return Played(done.stdout)

    def show(self, unit: str, name: str) -> str:
        return self.ssh(f"systemctl show --value --property {name} {unit}")

    def active(self, unit: str) -> str:
        return self.show(unit, "ActiveState")

    def pid(self, unit: str) -> int:
        return int(self.show(unit, "MainPID"))

    def entered(self, unit: str, state: str) -> int:
        return int(self.show(unit, f"{state}EnterTimestampMonotonic"))

    def journal(self, unit: str) -> str:
        """Of its last start."""
        identity = self.show(unit, "InvocationID")
        return self.ssh(
            f"journalctl --no-pager --output cat _SYSTEMD_INVOCATION_ID={identity} + INVOCATION_ID={identity}"
        )

    def wait(self, what: str, test, seconds: float = 90) -> None:
        ends = time.monotonic() + seconds
        while not test():
            assert time.monotonic() < ends, f"{what}: not after {seconds:g} s"
            time.sleep(0.3)


class Played:
    def __init__(self, printed: str) -> None:
        self.printed = printed
        # As sentences: what the callback broke into lines is joined again.
        self.text = " ".join(printed.split())

    @property
    def changed(self) -> int:
        return int(re.search(r"changed=(\d+)", self.printed)[1])

    def lists(self) -> dict[str, list[str]]:
        """What the roles report: daemons with older settings, daemons that have ended, engines with older settings."""
        found = json.loads(re.search(r"lists (\[\[.*?\]\])", self.text)[1])
        return dict(zip(("stale", "lost", "engines"), found, strict=True))


def engine(**keys) -> dict:
    one = {
        "name": "chat",
        "model": "/opt/models/m",
        "served_model_name": "m",
        "gpus": [GPU],
        "config": {"dtype": "bfloat16"},
        "env": SIM,
        "preload": {"daemon": "base", "wait": 20},
    }
    return one | keys


def daemon(**keys) -> dict:
    one = {
        "name": "base",
        "model": "/opt/models/m",
        "gpus": [GPU],
        "health_port": 8101,
        "config": {"dtype": "bfloat16"},
        "env": SIM,
        "seed": {"listen_host": "10.75.0.11", "listen_port": 29700, "token": TOKEN},
    }
    return one | keys


@contextlib.contextmanager
def booted(one: Host):
    top = one.top
    layer = subprocess.run(
        [sys.executable, CHECKOUT / "tests/lab/bake.py"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    one.lab("down", check=False)
    try:
        one.lab("up", "--subnet", one.subnet, "--hosts", "1", "--routers", "0", "--layer", layer)
        one.copy(CHECKOUT / "tests/sim", "/opt/sim")
        root = top / "root"
        model.write(root / "opt/models/m", "the weights")
        (root / "opt/models/m/tokenizer.json").write_text("{}")
        (root / "etc/tmpfiles.d").mkdir(parents=True)
        (root / "etc/tmpfiles.d/sim.conf").write_text(TMPFILES)
        (root / "opt/sim").mkdir()
        (root / "opt/sim/ledger").write_text(f"driver 580.105.08\ngpu {GPU} 143771 615 NVIDIA H200\n")
        subprocess.run(
            ["make", "-s", "-C", CHECKOUT / "tests/sim/nvml", f"BUILD={root}/usr/local/lib"], check=True, timeout=60
        )
        one.copy(root, "/")
        one.ssh(RUNTIME)
        yield one
    finally:
        one.lab("down", check=False)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with booted(Host(tmp_path_factory.mktemp("preload"))) as one:
        yield one


@pytest.fixture
def settled(host):
    """Both run, with the settings of the inventory; a test that breaks something mends it."""
    assert (host.active(DAEMON), host.active(ENGINE)) == ("active", "active")
    yield host
    assert (host.active(DAEMON), host.active(ENGINE)) == ("active", "active")


def test_a_first_run_in_check_mode_touches_nothing(host):
    played = host.play("--check")
    assert played.changed > 10
    assert host.ssh("ls /etc/vllm /etc/systemd/system | grep -c preload || true") == "0"


def test_the_first_run_brings_daemon_and_engine(host):
    host.play()
    assert (host.active(DAEMON), host.active(ENGINE)) == ("active", "active")
    assert host.ssh("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8101/health") == "200"
    assert "(zero_copy mode)" in host.journal(ENGINE)
    assert "falling back" not in host.journal(ENGINE)
    # The engine's process began when the daemon was proved, and not when its process did.
    assert host.entered(DAEMON, "Active") < int(host.show(ENGINE, "ExecMainStartTimestampMonotonic"))
    assert host.ssh("systemctl is-enabled vllm-preload@base") == "enabled"


def test_a_second_run_changes_nothing(settled):
    pids = settled.pid(DAEMON), settled.pid(ENGINE)
    played = settled.play()
    assert played.changed == 0, played.printed[-6000:]
    assert played.lists() == {"stale": [], "lost": [], "engines": []}
    assert settled.play("--check", "--skip-tags", "host").changed == 0
    assert (settled.pid(DAEMON), settled.pid(ENGINE)) == pids


def test_what_lies_on_the_host(settled):
    value = json.loads(settled.ssh("cat /etc/vllm/preload/base.json"))
    directory = value["socket_dir"]
    assert settled.ssh(f"stat -c '%U %a %F' {directory}") == "vllm 700 directory"
    assert value["sockets"] == [SOCKET]
    assert settled.ssh(f"stat -c %F {directory}/{SOCKET}") == "socket"
    assert settled.ssh("readlink /opt/vllm/preload/base") == "../runtimes/0.33.0"
    assert settled.ssh("stat -c '%U %a %n' /etc/vllm/preload /etc/vllm/preload/*").splitlines() == [
        "root 700 /etc/vllm/preload",
        "root 600 /etc/vllm/preload/base.env",
        "root 600 /etc/vllm/preload/base.json",
        "root 600 /etc/vllm/preload/base.yaml",
    ]
    listeners = settled.ssh("ss -Hltn 'sport = :8101'").split()
    assert listeners[3] == "127.0.0.1:8101"
    # One user, one IPC and one PID namespace, one /dev/shm: what CUDA needs to share memory.
    spaces = {
        unit: settled.ssh(
            f"cd /proc/{settled.pid(unit)}; readlink ns/ipc ns/pid ns/user; stat -c %u .; stat -c '%d %i' root/dev/shm"
        )
        for unit in (ENGINE, DAEMON)
    }
    assert spaces[ENGINE] == spaces[DAEMON]


def test_the_token_is_where_root_and_the_service_alone_can_read_it(settled):
    assert TOKEN in settled.ssh("cat /etc/vllm/preload/base.yaml")
    assert TOKEN in settled.ssh(f"cat /proc/{settled.pid(DAEMON)}/root/run/credentials/{DAEMON}/options.yaml")
    assert TOKEN not in settled.printed
    # Written so that the search does not find itself.
    assert (
        settled.ssh("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | grep -ac 'hors[e]-battery'; true")
        == "0"
    )
    assert TOKEN not in settled.ssh("journalctl --no-pager")
    folders = "/etc /opt/vllm/preload /var/lib/vllm /run/vllm /run/credentials"
    assert settled.ssh(f"runuser -u nobody -- grep -rlsI 'hors[e]-battery' {folders}; true") == ""
    assert TOKEN not in settled.ssh("systemctl show vllm-preload@base; systemctl cat vllm-preload@base")


def test_systemd_has_nothing_to_say_about_the_units(settled):
    assert settled.ssh(f"systemd-analyze verify {DAEMON} {ENGINE} 2>&1") == ""
    rating = settled.ssh(f"systemd-analyze security --no-pager {DAEMON} | tail -1")
    assert float(re.search(r"(\d+[.]\d+)", rating)[1]) <= 2.6


def test_new_settings_are_reported_and_wait(settled):
    pid = settled.pid(DAEMON)
    other = [daemon(config={"dtype": "bfloat16", "max-model-len": 1024})]
    short = ("--skip-tags", "host,vllm_engine_configure,vllm_engine_service")
    assert settled.play("--check", *short, vllm_preload_instances=other).lists()["stale"] == ["base"]
    played = settled.play(*short, vllm_preload_instances=other, vllm_preload_restart=True)
    assert played.lists()["stale"] == ["base"]
    assert "preload daemon(s) base still run with older settings" in played.text
    assert "playbook baremetal.vllm.rolling_restart" in played.text
    assert settled.pid(DAEMON) == pid
    # Without a running engine the role may do it, but only when it is told to.
    settled.ssh(f"systemctl stop {ENGINE}")
    service = ("--tags", "vllm_preload_service")
    settled.play(*service, vllm_preload_instances=other)
    assert settled.pid(DAEMON) == pid, "what one run found is forgotten in the next, or it restarts unasked"
    settled.play(*service, vllm_preload_instances=other, vllm_preload_restart=True)
    assert settled.pid(DAEMON) != pid
    settled.play("--skip-tags", "host", vllm_preload_restart=True)


def test_the_module_brings_and_takes_a_daemon_and_refuses_to_under_an_engine(settled):
    settled.play(book="modules.yml")


def test_a_stop_is_a_stop_and_leaves_the_engine_alone(settled):
    engine_pid = settled.pid(ENGINE)
    settled.ssh(f"systemctl stop {DAEMON}")
    assert (settled.active(DAEMON), settled.show(DAEMON, "Result")) == ("inactive", "success")
    assert settled.show(DAEMON, "ExecMainStatus") == "241"
    assert settled.active(ENGINE) == "active"
    directory = json.loads(settled.ssh("cat /etc/vllm/preload/base.json"))["socket_dir"]
    assert settled.ssh(f"stat -c '%U %a' {directory}") == "vllm 700"

    played = settled.play("--skip-tags", "host")
    assert played.lists() == {"stale": [], "lost": ["base"], "engines": []}
    assert "preload daemon(s) base do not run" in played.text
    assert "(chat) serve on" in played.text
    assert (settled.active(DAEMON), settled.pid(ENGINE)) == ("inactive", engine_pid)

    # Nor by hand: the door refuses a second copy.
    assert "failed" in settled.ssh(f"systemctl start {DAEMON} 2>&1", check=False)
    assert settled.active(DAEMON) == "failed"
    assert "chat" in settled.journal(DAEMON)
    assert settled.pid(ENGINE) == engine_pid

    # The engine's restart has the daemon started between its stop and its start.
    settled.ssh(f"systemctl restart {ENGINE}")
    assert settled.pid(ENGINE) != engine_pid
    stopped = settled.entered(ENGINE, "Inactive")
    assert stopped < int(settled.show(DAEMON, "ExecMainStartTimestampMonotonic"))
    assert settled.entered(DAEMON, "Active") < int(settled.show(ENGINE, "ExecMainStartTimestampMonotonic"))
    assert "(zero_copy mode)" in settled.journal(ENGINE)


def test_a_restart_of_the_daemon_does_not_end_its_engine(settled):
    pid = settled.pid(ENGINE)
    settled.ssh(f"systemctl restart {DAEMON}", check=False)
    assert (settled.active(ENGINE), settled.pid(ENGINE)) == ("active", pid)
    assert settled.active(DAEMON) == "failed", "it holds a second copy now"
    settled.ssh(f"systemctl restart {ENGINE}")


def test_the_daemon_waits_for_its_engine_to_stop_and_the_engine_for_its_daemon_to_start(settled):
    settled.ssh(f"systemctl stop {ENGINE} {DAEMON}")
    assert settled.entered(ENGINE, "Inactive") < settled.entered(DAEMON, "Inactive")
    settled.ssh(f"systemctl start {ENGINE}")
    assert settled.active(DAEMON) == "active", "its engine had it started"
    assert settled.entered(DAEMON, "Active") < int(settled.show(ENGINE, "ExecMainStartTimestampMonotonic"))


def test_a_reboot_ends_and_brings_both_in_order(settled):
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = settled.ssh(boot)
    settled.ssh("mkdir -p /var/log/journal && journalctl --flush && systemctl reboot", check=False)
    settled.wait("another boot", lambda: settled.ssh(boot, check=False) not in ("", before))
    settled.wait("an engine that serves", lambda: settled.active(ENGINE) == "active")
    assert settled.active(DAEMON) == "active"
    assert settled.entered(DAEMON, "Active") < int(settled.show(ENGINE, "ExecMainStartTimestampMonotonic"))
    said = settled.ssh("journalctl --boot -1 --no-pager --output cat _PID=1")
    ended = said.rindex(f"Stopped {ENGINE}"), said.rindex(f"Stopping {DAEMON}")
    assert ended[0] < ended[1], "the daemon did not wait until its engine had drained"
    assert settled.play("--skip-tags", "host").changed == 0


BROKEN = r"""
folder=/etc/systemd/system/vllm-preload@base.service.d
printf '[Service]\nExecStart=\nExecStart=/bin/sh -c "echo no such weights; exit 7"\n' > $folder/95-broken.conf
systemctl daemon-reload
"""


def test_an_engine_whose_daemon_fails_says_so(host):
    host.ssh(f"systemctl stop {ENGINE} {DAEMON}")
    host.ssh(BROKEN)
    try:
        assert "failed" in host.ssh(f"systemctl start {ENGINE} 2>&1", check=False)
        said = host.ssh(f"journalctl --no-pager --output cat --unit {ENGINE} --lines 60")
        assert "daemon 'base' is failed" in said
        assert "no such weights" in said, "the daemon's own last words"
        assert host.active(DAEMON) == "failed"
        host.ssh(f"systemctl stop {ENGINE}")
        played = host.play("--tags", "vllm_preload_service", rc=2)
        assert "preload daemon 'base' did not get ready" in played.text
        assert "no such weights" in played.text
        assert host.active(ENGINE) != "active"
    finally:
        host.ssh("rm /etc/systemd/system/vllm-preload@base.service.d/95-broken.conf; systemctl daemon-reload")
        host.ssh(f"systemctl stop {ENGINE}")
    host.play("--skip-tags", "host")
    assert (host.active(DAEMON), host.active(ENGINE)) == ("active", "active")


FILES = "stat -c '%n %Y %Z' /etc/vllm/preload/* /etc/vllm/engines/* /etc/systemd/system/vllm-*"


@pytest.mark.parametrize(
    ("before", "after", "says", "variables"),
    [
        (
            "chmod 0755 {socket_dir}", "chmod 0700 {socket_dir}",
            r"preload daemon 'base' are in /run/vllm/[A-Z]{{3}}, which is a directory of vllm with mode 0755", {},
        ),
        (
            "chown root {socket_dir}", "chown vllm {socket_dir}", "a directory of root with mode 0700", {},
        ),
        (
            "mv {socket_dir} {socket_dir}x && ln -s {socket_dir}x {socket_dir}",
            "rm {socket_dir} && mv {socket_dir}x {socket_dir}", "which is a link of root", {},
        ),
        (
            "chmod 0600 /opt/models/m/model.safetensors; chown root /opt/models/m/model.safetensors",
            "chmod 0644 /opt/models/m/model.safetensors", "cannot read /opt/models/m/model.safetensors", {},
        ),
        ("true", "true", "wants vLLM 0.34.0, and no complete runtime", {"vllm_runtime_version": "0.34.0"}),
        (
            "true", "true", "/etc/none.txt, which says what weights a preload daemon may load, is not a file",
            {"vllm_preload_weights": {"allowed_file": "/etc/none.txt"}},
        ),
        (
            "true", "true", "preload daemon 'base' still runs, though vllm_preload_instances no longer lists it",
            {"vllm_preload_instances": [daemon(name="other", seed={}, health_port=8102)],
             "vllm_engine_instances": [engine(preload={"daemon": "other"})]},
        ),
        (
            "systemd-run --unit squatter --collect python3 -m http.server --bind 127.0.0.1 8102",
            "systemctl stop squatter",
            r"preload daemon 'two' does not run, and on its ports \(8102\) somebody else listens.*python3",
            {"vllm_preload_instances": [daemon(), daemon(name="two", seed={}, health_port=8102)]},
        ),
    ],
    ids=["mode", "owner", "link", "unreadable", "runtime", "allowed", "renamed", "port"],
)  # fmt: skip
def test_refused_on_sight_and_nothing_is_touched(settled, before, after, says, variables):
    socket_dir = json.loads(settled.ssh("cat /etc/vllm/preload/base.json"))["socket_dir"]
    state = settled.ssh(FILES), settled.pid(DAEMON), settled.pid(ENGINE)
    settled.ssh(before.format(socket_dir=socket_dir))
    try:
        settled.wait("a squatter", lambda: "squatter" not in before or settled.ssh("ss -Hltn 'sport = :8102'"))
        # One of them by a whole run; for the others only what every run does first.
        tags = ("--skip-tags", "host") if "0755" in before else ("--tags", "always")
        played = settled.play(*tags, rc=2, **variables)
    finally:
        settled.ssh(after.format(socket_dir=socket_dir))
    assert re.search(says.replace("{{", "{").replace("}}", "}"), played.text), played.printed[-3000:]
    assert "Next step: " in played.text
    assert (settled.ssh(FILES), settled.pid(DAEMON), settled.pid(ENGINE)) == state


@pytest.mark.parametrize(
    ("unit", "lines"),
    [
        (DAEMON, ["PrivateIPC=yes", "PrivateTmp=yes", "Restart=on-failure", "TemporaryFileSystem=/dev/shm"]),
        (ENGINE, ["PrivateIPC=yes", "InaccessiblePaths=/run/vllm", "User=root"]),
    ],
)
def test_a_drop_in_that_separates_them_is_found(settled, unit, lines):
    pids = settled.pid(DAEMON), settled.pid(ENGINE)
    drop_in = f"/etc/systemd/system/{unit}.d/90-local.conf"
    settled.ssh(f"printf '%s\\n' '[Service]' {' '.join(lines)} > {drop_in}")
    try:
        played = settled.play("--tags", "vllm_preload_configure,vllm_engine_configure", rc=2)
    finally:
        settled.ssh(f"rm {drop_in}; systemctl daemon-reload")
    found = re.search(f"e1: {unit} has (.*?), so", played.text)
    assert found, played.printed[-3000:]
    assert sorted(found[1].split(", ")) == sorted(lines)
    assert (settled.pid(DAEMON), settled.pid(ENGINE)) == pids


def test_a_roll_brings_a_lost_daemon_back_under_neither_of_its_engines(settled):
    """Leaves the host with a second engine."""
    settled.ssh(f"echo SIM_LEDGER={SIM['SIM_LEDGER']} >> /etc/environment")
    share = {"dtype": "bfloat16", "gpu-memory-utilization": 0.3}
    both = {"vllm_engine_instances": [engine(config=share), engine(name="code", config=share)]}
    roll = {**both, "vllm_roll_min_serving": 0, "book": str(CHECKOUT / "playbooks/rolling_restart.yml")}
    units = [ENGINE, "vllm-engine@code.service"]
    settled.ssh(f"systemctl stop {ENGINE}")  # it has the whole GPU
    settled.play("--skip-tags", "host", **both)
    assert [settled.active(unit) for unit in units] == ["active", "active"]
    settled.ssh(f"systemctl stop {DAEMON}")
    before = [settled.pid(unit) for unit in units]

    said = settled.play(**roll).text
    assert re.findall(r"(chat|code) starts \S+ from preload daemon base \(lost", said) == ["chat", "code"]
    assert all(old != settled.pid(unit) for old, unit in zip(before, units, strict=True))
    began = int(settled.show(DAEMON, "ExecMainStartTimestampMonotonic"))
    assert all(settled.entered(unit, "Inactive") < began for unit in units), "it started under an engine"
    ready = settled.entered(DAEMON, "Active")
    assert all(ready < int(settled.show(unit, "ExecMainStartTimestampMonotonic")) for unit in units)
    assert all("(zero_copy mode)" in settled.journal(unit) for unit in units)
    assert settled.ssh("ls /var/lib/vllm/*/lease.json", check=False) == ""

    # What could not start from its daemon again is refused before anything stops.
    before = [settled.pid(unit) for unit in units]
    settled.ssh("mv /etc/vllm/preload/base.json /root/")
    try:
        said = settled.play(**roll, rc=2).text
    finally:
        settled.ssh("mv /root/base.json /etc/vllm/preload/")
    assert "would not start again from preload daemon 'base'" in said
    assert "No host was touched" in said
    assert [settled.pid(unit) for unit in units] == before
