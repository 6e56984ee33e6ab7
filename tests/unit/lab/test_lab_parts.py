"""The pure parts of the lab: names, addresses, inventory, cache keys, state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[2] / "lab"
sys.path.insert(0, str(LAB))

from labkit import base, files, plan, shelf, state
from labkit.plan import Lab, LabError


@pytest.fixture
def lab():
    return Lab.parse("lab", "10.77.0.0/24")


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "ROOT", tmp_path / "run")
    monkeypatch.setenv("VLLM_LAB_CACHE", str(tmp_path / "cache"))


def test_addresses(lab):
    found = {host: str(lab.address(host)) for host in ("e1", "e3", "e90", "r1", "c1", "c54")}
    assert found == {
        "e1": "10.77.0.11/24",
        "e3": "10.77.0.13/24",
        "e90": "10.77.0.100/24",
        "r1": "10.77.0.101/24",
        "c1": "10.77.0.201/24",
        "c54": "10.77.0.254/24",
    }
    assert str(lab.gateway) == "10.77.0.1/24"


def test_no_two_hosts_share_an_address(lab):
    hosts = plan.names(90, 99, 54)
    assert len({lab.address(host) for host in hosts}) == len(hosts)


@pytest.mark.parametrize("host", ["e0", "e91", "c55", "x1", "e", "e1x", "E1", "e01"])
def test_unknown_host_names(host):
    with pytest.raises(LabError, match="engines e1 to e90"):
        plan.split(host)


@pytest.mark.parametrize("name", ["", "9lab", "Lab", "lab-1", "ninechars"])
def test_lab_names_that_do_not_fit(name):
    with pytest.raises(LabError, match="--name"):
        Lab.parse(name, "10.77.0.0/24")


@pytest.mark.parametrize("subnet", ["10.77.0.1/24", "10.77.0.0/25", "nonsense"])
def test_subnets_that_do_not_fit(subnet):
    with pytest.raises(LabError, match="--subnet"):
        Lab.parse("lab", subnet)


def test_interface_names_fit_the_kernel():
    longest = Lab.parse("eightlet", "10.77.0.0/24")
    assert max(len(longest.veth("e90")), len(longest.bridge)) <= 15


def test_inventory(lab):
    content = json.loads(plan.inventory(lab, ["r1", "e2", "e1"], "/key", "/sockets"))
    groups = content["all"]["children"]
    assert groups["vllm_engines"]["hosts"] == {
        "e1": {"ansible_host": "10.77.0.11"},
        "e2": {"ansible_host": "10.77.0.12"},
    }
    assert list(groups["vllm_routers"]["hosts"]) == ["r1"]
    common = content["all"]["vars"]
    assert common["ansible_user"] == "root"
    assert common["ansible_ssh_private_key_file"] == "/key"
    for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ControlPath=/sockets/%C"):
        assert f"-o {option}" in common["ansible_ssh_common_args"]


def test_hosts_file_has_all_hosts_in_order(lab):
    lines = plan.hosts_file(lab, ["r1", "e10", "e2"]).splitlines()
    assert lines[2:] == ["10.77.0.12 e2", "10.77.0.20 e10", "10.77.0.101 r1"]


def test_digest_tells_where_text_moved():
    assert files.digest(["ab", "c"]) != files.digest(["a", "bc"])
    assert files.digest(["ab", "c"]) == files.digest(["ab", b"c"])


def test_base_key_follows_packages_and_mirror(tmp_path, monkeypatch):
    for name in (base.INSTALLED, base.OFFERED):
        (tmp_path / name).write_text("one\n")
    monkeypatch.setattr(files, "HERE", tmp_path)
    first = base.key()
    (tmp_path / base.OFFERED).write_text("one\n\n# said twice\n")
    assert base.key() == first
    (tmp_path / base.OFFERED).write_text("one\ntwo\n")
    second = base.key()
    assert second != first
    monkeypatch.setenv("VLLM_LAB_MIRROR", "http://mirror.example/debian")
    assert base.key() not in (first, second)


def test_lower_directories_are_topmost_first(tmp_path):
    assert base.lower("b", ["top", "below"]).split(":") == [
        f"{tmp_path}/cache/{part}/tree" for part in ("layers/top", "layers/below", "bases/b")
    ]


@pytest.mark.parametrize("layer", ["", "a/b", "a:b", "a,b", ".a"])
def test_layer_names_that_do_not_fit(layer):
    with pytest.raises(LabError, match="layer"):
        base.layer_path(layer)


@pytest.mark.parametrize("path", ["/tmp/a:b", "/tmp/a,b", "/run/lab"])
def test_caches_that_do_not_fit(path, monkeypatch):
    monkeypatch.setenv("VLLM_LAB_CACHE", path)
    with pytest.raises(LabError, match="VLLM_LAB_CACHE"):
        files.cache()


def test_state_comes_back_as_saved(lab):
    made = state.State.new(lab, "b", ["top"])
    made.layers = {"e1": ["top"], "r1": []}
    made.directory.mkdir(parents=True)
    made.save()
    assert state.load("lab") == made
    assert state.names() == ["lab"]
    assert made.hosts == ["e1", "r1"]


def test_two_labs_differ_in_token_and_mac(lab):
    one, two = state.State.new(lab, "b", []), state.State.new(lab, "b", [])
    assert one.token != two.token
    assert one.bridge_mac != two.bridge_mac
    assert int(one.bridge_mac[:2], 16) & 3 == 2  # local, not multicast


def test_unknown_lab_and_host_are_named(lab):
    with pytest.raises(LabError, match="no lab gone; `lab up --name gone`"):
        state.require("gone")
    made = state.State.new(lab, "b", [])
    made.layers = {"e1": []}
    with pytest.raises(LabError, match="no host e2; it has e1"):
        made.require("e2")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": 1, "name": "lab"}'])
def test_state_that_cannot_be_read_is_said(text):
    state.directory("lab").mkdir(parents=True)
    (state.directory("lab") / "state.json").write_text(text)
    with pytest.raises(LabError, match=r"state\.json"):
        state.load("lab")


def test_made_whole_leaves_nothing_of_a_failure(tmp_path):
    target = tmp_path / "things" / "one"
    with pytest.raises(RuntimeError), files.made_whole(target) as directory:
        (directory / "part").write_text("half")
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    with files.made_whole(target) as directory:
        (directory / "part").write_text("whole")
    assert [path.name for path in target.parent.iterdir()] == ["one"]
    with files.made_whole(target) as directory:
        assert directory is None


def test_made_whole_sweeps_what_a_killed_maker_left(tmp_path):
    left = tmp_path / "things" / ".making-dead"
    left.mkdir(parents=True)
    with files.made_whole(tmp_path / "things" / "one"):
        assert not left.exists()


def test_sweep_leaves_a_maker_at_work_alone(tmp_path):
    with files.made_whole(tmp_path / "things" / "one") as directory:
        files.sweep_idle(tmp_path)
        assert directory.is_dir()


def test_lock_excludes_and_ends(tmp_path):
    with files.locked(tmp_path) as first, files.locked(tmp_path, wait=False) as second:
        assert (first, second) == (True, False)
    with files.locked(tmp_path, wait=False) as again:
        assert again


@pytest.mark.parametrize("name", shelf.HOUSES)
def test_wheel_lists_are_pinned(name):
    lines = files.listed(LAB / "wheels" / f"{name}.txt")
    assert lines
    assert all("==" in line for line in lines)
    assert len({line.split("==")[0] for line in lines}) == len(lines)


def test_model_is_the_same_for_a_seed_and_another_for_another(tmp_path):
    for directory, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        subprocess.run([sys.executable, LAB / "make_model.py", tmp_path / directory, seed], check=True)
    a, b, c = ((tmp_path / directory / "model.safetensors").read_bytes() for directory in "abc")
    assert a == b
    assert a != c
    assert len(a) == len(c)
    vocabulary = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(512))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
def test_not_root_is_said():
    done = subprocess.run([LAB / "lab", "status"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not root" in done.stderr
