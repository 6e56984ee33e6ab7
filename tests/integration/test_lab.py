"""The lab keeps its promises: it makes real hosts fast; when it ends, all of it is gone, and nothing else.

Needs root and the packages of tests/lab/apt.txt; makes the base tree where the cache has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1] / "lab"
sys.path.insert(0, str(LAB))

from labkit import files, plan, state

NAME = "selftest"
SUBNET = "10.77.250.0/24"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")


def lab(*arguments, check=True, **options):
    done = subprocess.run(
        [LAB / "lab", *arguments], check=False, capture_output=True, text=True, timeout=600, **options
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def up(*arguments, **options):
    return lab("up", "--name", NAME, "--subnet", SUBNET, *arguments, **options)


def down():
    return lab("down", "--name", NAME)


def ssh(host, command):
    return lab("ssh", "--name", NAME, host, command).stdout.strip()


def ip(*arguments):
    return json.loads(subprocess.run(["ip", "-json", *arguments], check=True, capture_output=True, text=True).stdout)


def interfaces():
    return {link["ifname"]: link for link in ip("address", "show")}


def processes_with(text):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command and int(process.name) != os.getpid():
                found.append(command)
    return found


def mounts_with(text):
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.update(line for line in (process / "mountinfo").read_text().splitlines() if text in line)
    return sorted(found)


def cgroups():
    listing = "mount -t cgroup2 none /sys/fs/cgroup && ls /sys/fs/cgroup"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", listing]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in names if name.startswith(f"baremetal-vllm-lab.{NAME}.")]


def left():
    """All that a lab of this name could have left on the machine."""
    disks = str(files.cache() / "labs" / NAME)
    return {
        "processes": processes_with(disks) + processes_with(f"/{NAME}/ssh"),
        "mounts": mounts_with(disks),
        "interfaces": [name for name in interfaces() if NAME in name],
        "cgroups": cgroups(),
        "files": [
            str(path)
            for path in (state.directory(NAME), Path(disks), Path(f"/run/systemd/nspawn/propagate/{NAME}-e1"))
            if path.exists()
        ],
    }


NOTHING = {"processes": [], "mounts": [], "interfaces": [], "cgroups": [], "files": []}


@pytest.fixture(autouse=True)
def ended():
    down()
    yield
    down()


@pytest.fixture(scope="module", autouse=True)
def base_tree():
    """So that no test pays for it."""
    lab("down", "--name", NAME)
    up("--hosts", "1", "--routers", "0")
    lab("down", "--name", NAME)


@contextlib.contextmanager
def bridge(name, address=None):
    subprocess.run(["ip", "link", "add", "name", name, "type", "bridge"], check=True)
    try:
        if address:
            subprocess.run(["ip", "address", "add", address, "dev", name], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "delete", "dev", name], check=True)


def test_hosts_are_whole_systems_and_know_each_other():
    start = time.monotonic()
    up("--hosts", "3", "--routers", "1")
    assert time.monotonic() - start <= 15
    assert ssh("e1", "systemctl is-system-running; hostname; cat /proc/1/comm") == "running\ne1\nsystemd"
    assert ssh("e1", "ping -q -c1 -W2 r1 >/dev/null && echo there") == "there"
    assert ssh("e2", "apt-get install -qq -y haproxy >/dev/null 2>&1; systemctl is-active haproxy") == "active"
    assert len({ssh(host, "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub") for host in ("e1", "e2", "r1")}) == 3

    boots = {host: ssh(host, "cat /proc/sys/kernel/random/boot_id") for host in ("e1", "r1")}
    assert "0 started, 4 were running" in up("--hosts", "3", "--routers", "1").stderr
    assert "1 started, 4 were running" in up("--clients", "1").stderr
    assert {host: ssh(host, "cat /proc/sys/kernel/random/boot_id") for host in boots} == boots
    assert ssh("e1", "getent hosts c1").split() == ["10.77.250.201", "c1"]

    groups = json.loads(lab("inventory", "--name", NAME).stdout)["all"]["children"]
    assert list(groups["vllm_engines"]["hosts"]) == ["e1", "e2", "e3"]
    down()
    assert left() == NOTHING


def test_power_cut_reboot_and_cable():
    up("--hosts", "1", "--routers", "1")
    ssh("e1", "echo kept > /root/kept && sync")
    lab("kill", "--name", NAME, "e1")
    (found,) = [one for one in json.loads(lab("status", "--json").stdout) if one["name"] == NAME]
    assert [found["hosts"][host]["running"] for host in ("e1", "r1")] == [False, True]
    lab("boot", "--name", NAME, "e1")
    assert ssh("e1", "cat /root/kept") == "kept"

    lab("cut", "--name", NAME, "e1")
    assert ssh("r1", "ping -q -c1 -W1 e1 >/dev/null || echo gone") == "gone"
    lab("mend", "--name", NAME, "e1")
    assert ssh("r1", "ping -q -c1 -W2 e1 >/dev/null && echo back") == "back"

    before = ssh("r1", "cat /proc/sys/kernel/random/boot_id")
    lab("ssh", "--name", NAME, "r1", "systemctl reboot", check=False)
    end = time.monotonic() + 30
    command = ["ssh", "--name", NAME, "r1", "cat /proc/sys/kernel/random/boot_id"]
    while (after := lab(*command, check=False).stdout.strip()) in ("", before) and time.monotonic() < end:
        time.sleep(0.3)
    assert after not in ("", before)
    lab("kill", "--name", NAME, "r1")
    lab("boot", "--name", NAME, "r1")
    down()
    assert left() == NOTHING


def test_freeze_keeps_what_was_installed_and_not_who_it_was():
    layer = f"selftest-{os.getpid()}"
    path = files.cache() / "layers" / layer
    try:
        up("--hosts", "1", "--routers", "0")
        old = ssh("e1", "mkdir -p /var/lib/vllm /opt/baked; touch /var/lib/vllm/x /opt/baked/x; cat /etc/machine-id")
        lab("freeze", "--name", NAME, "--from", "e1", "--as", layer)
        down()
        up("--hosts", "2", "--routers", "0", "--layer", layer)
        assert ssh("e2", "ls /opt/baked /var/lib/vllm; hostname") == "/opt/baked:\nx\n\n/var/lib/vllm:\ne2"
        assert len({old, *(ssh(host, "cat /etc/machine-id") for host in ("e1", "e2"))}) == 3
        down()
        assert path.is_dir()
        assert "--as gone` makes it" in up("--layer", "gone", check=False).stderr
    finally:
        down()
        subprocess.run(["rm", "-rf", path], check=True)
    assert left() == NOTHING


@pytest.mark.parametrize("seconds", [0.15, 0.4, 0.7, 1.1])
def test_nothing_is_left_of_an_up_that_was_killed_midway(seconds):
    process = subprocess.Popen(
        [LAB / "lab", "up", "--name", NAME, "--subnet", SUBNET, "--hosts", "2", "--routers", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    down()
    assert left() == NOTHING
    assert "there is no lab" in down().stderr


def test_an_up_that_was_killed_midway_is_finished_by_the_next():
    process = subprocess.Popen(
        [LAB / "lab", "up", "--name", NAME, "--subnet", SUBNET, "--hosts", "2", "--routers", "0"]
    )
    time.sleep(0.6)
    process.send_signal(signal.SIGKILL)
    process.wait()
    up("--hosts", "2", "--routers", "0")
    assert [ssh(host, "systemctl is-system-running --wait") for host in ("e1", "e2")] == ["running"] * 2


def test_nothing_is_left_of_a_base_tree_that_was_killed_midway(tmp_path):
    environment = {**os.environ, "VLLM_LAB_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [LAB / "lab", "up", "--name", NAME, "--subnet", SUBNET],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 20
    while not processes_with("/usr/sbin/debootstrap") and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1)
    assert mounts_with(str(tmp_path))
    process.send_signal(signal.SIGKILL)
    process.wait()
    lab("down", "--name", NAME, env=environment)
    assert left() == NOTHING
    assert (processes_with(str(tmp_path)), mounts_with(str(tmp_path))) == ([], [])
    assert list((tmp_path / "cache").glob("*/.making-*")) == []


def test_a_foreign_bridge_with_the_same_address_is_left_alone():
    with bridge("vltest-foreign", "10.77.250.1/24"):
        before = interfaces()["vltest-foreign"]
        done = up(check=False)
        assert done.returncode != 0
        assert "10.77.250.0/24 is taken: vltest-foreign has 10.77.250.1/24; use another --subnet" in done.stderr
        assert left() == NOTHING
        down()
        assert interfaces()["vltest-foreign"] == before


def test_a_foreign_bridge_with_the_lab_bridge_s_name_is_left_alone():
    name = plan.Lab.parse(NAME, SUBNET).bridge
    with bridge(name):
        done = up(check=False)
        assert f"interface {name} is there and of no lab" in done.stderr
        down()
        assert name in interfaces()

    up("--hosts", "0", "--routers", "0")
    subprocess.run(["ip", "link", "delete", "dev", name], check=True)
    with bridge(name):
        assert f"interface {name} is not ours: left alone" in down().stderr
        assert name in interfaces()
    assert left() == NOTHING


def test_two_labs_live_side_by_side():
    other = "selfte2"
    try:
        up("--hosts", "1", "--routers", "0")
        lab("up", "--name", other, "--subnet", "10.77.251.0/24", "--hosts", "1", "--routers", "0")
        done = lab("up", "--name", "selfte3", "--subnet", SUBNET, check=False)
        assert "use another --subnet" in done.stderr
        down()
        assert lab("ssh", "--name", other, "e1", "hostname").stdout.strip() == "e1"
    finally:
        lab("down", "--name", other)
    assert left() == NOTHING
