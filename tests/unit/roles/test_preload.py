# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Roles vllm_engine and vllm_preload by their variables alone: what they refuse, and what they write when they do not.

One run over all cases, each of them a host of its own: a case is a change of variables that are good.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT, TEXT, Role

GPU = [f"GPU-{number:08x}-0000-1111-2222-333333333333" for number in range(8)]
TOKEN = "correct-horse-battery-staple"
PLAY = """
- hosts: all
  gather_facts: false
  connection: local
  tasks:
    - block:
        - ansible.builtin.import_role: {name: baremetal.vllm.vllm_engine, tasks_from: preflight}
        - ansible.builtin.import_role: {name: baremetal.vllm.vllm_preload, tasks_from: preflight}
      rescue:
        - ansible.builtin.copy:
            content: "{{ ansible_failed_result | to_json }}"
            dest: "{{ out }}/{{ inventory_hostname }}"
            mode: "0600"
          vars: {ansible_python_interpreter: "{{ ansible_playbook_python }}"}
"""
GOOD = {
    "vllm_engine_instances": [
        {
            "name": "chat",
            "model": "/srv/models/m",
            "port": 8001,
            "gpus": [GPU[0]],
            "config": {"dtype": "bfloat16"},
            "preload": {"daemon": "base"},
        }
    ],
    "vllm_preload_instances": [
        {
            "name": "base",
            "model": "/srv/models/m",
            "health_port": 8101,
            "gpus": [GPU[0]],
            "config": {"dtype": "bfloat16"},
        }
    ],
}
SEED = {"listen_host": "10.0.0.1", "listen_port": 29700, "token": TOKEN}
ANOTHER = {"name": "two", "model": "/srv/models/m", "health_port": 8102, "gpus": [GPU[1]]}
MAPPER = {"name": "code", "model": "/srv/models/m", "gpus": [GPU[0]], "config": {"dtype": "bfloat16"}}


def engine(config=None, **keys):
    """A change of the engine."""
    return lambda value: change(value["vllm_engine_instances"][0], config, keys)


def daemon(config=None, **keys):
    """A change of the daemon."""
    return lambda value: change(value["vllm_preload_instances"][0], config, keys)


def change(one, config, keys):
    one["config"].update(config or {})
    one.update(keys)


def both(config=None, **keys):
    """The same change of engine and daemon."""
    return [engine(config, **keys), daemon(config, **keys)]


def variables(**keys):
    return lambda value: value.update(keys)


def one_more(kind, one):
    return lambda value: value[f"vllm_{kind}_instances"].append(one)


def preload(**keys):
    return engine(preload={"daemon": "base", **keys})


# What is good beside the plain pair, for what it renders.
ACCEPTED = {
    "good": [],
    "good-plain": [engine(preload=None), variables(vllm_preload_instances=[])],
    "good-copy": [preload(mode="copy", fallback=True, wait=30), engine({"enable-sleep-mode": True})],
    "good-sleep": [preload(allow_zero_copy_sleep=True), engine({"enable-sleep-mode": True})],
    "good-two-map": [one_more("engine", {**MAPPER, "preload": {"daemon": "base"}})],
    "good-two-daemons": [one_more("preload", ANOTHER)],
    "good-parallel": both({"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, gpus=GPU[:4]),
    "good-text": [
        engine({"tensor-parallel-size": "2"}, gpus=GPU[:2]),
        daemon({"tensor-parallel-size": 2}, gpus=GPU[:2]),
    ],
    "good-experts": both({"data-parallel-size": 4, "enable-expert-parallel": True}, gpus=GPU[:4]),
    "good-nodes": [
        *both({"tensor-parallel-size": 16, "nnodes": 2, "node-rank": 1, "master-addr": "10.0.0.1"}, gpus=GPU),
        daemon({"weight-cache-master-port": 29600}),
    ],
    "good-drafts": both({"speculative-config": {"method": "eagle3", "model": "/srv/models/draft"}}),
    "good-seed": [daemon(seed=SEED, secret_env={"HF_TOKEN": 'quo"te$'})],
    "good-weights": [
        daemon(weights={"method": "sample", "allowed_file": "/etc/ok"}),
        variables(vllm_preload_weights={"allowed": ["sha256:" + "0" * 64]}),
    ],
}
# Name: changes, and what the message has to say. By the engine's role, for the engine and the pair.
REFUSED_ENGINES = {
    "unknown-daemon": (
        preload(daemon="bose"),
        "engine 'chat' has preload .*bose.* one of vllm_preload_instances .*base",
    ),
    "no-daemon": ([preload(), variables(vllm_preload_instances=[])], "there is none"),
    "preload-text": (engine(preload="base"), "engine 'chat' has preload \"base\".*preload: {daemon: NAME}"),
    "preload-key": (preload(fallbak=True), "only keys are"),
    "preload-mode": (preload(mode="zero-copy"), "mode is zero_copy or copy"),
    "preload-wait": (preload(wait=0), "wait is above 0"),
    "loader": (
        engine({"load-format": "safetensors"}),
        "'chat' has load-format in its config and names preload daemon base",
    ),
    "loader-extra": (engine({"model-loader-extra-config": {"fallback": True}}), "model-loader-extra-config"),
    "loader-alone": (engine({"load-format": "ipc_cache"}, preload=None), "names no preload daemon.* name a daemon"),
    "gpus": (engine(gpus=[GPU[1]]), f"differs in GPUs. Engine: GPUs={GPU[1]}; daemon: GPUs={GPU[0]}"),
    "gpu-index": (engine(gpus=[0]), f"Engine: GPUs=0; daemon: GPUs={GPU[0]}"),
    "gpus-any": (engine(gpus=[]), "Engine: GPUs=;"),
    "gpu-order": (
        [*both({"tensor-parallel-size": 2}, gpus=GPU[:2]), engine(gpus=GPU[1::-1])],
        "differs in GPUs",
    ),
    "dtype": (engine({"dtype": "float16"}), "differs in dtype. Engine: dtype=float16; daemon: dtype=bfloat16"),
    "dtype-default": (
        daemon(config=None) and (lambda value: value["vllm_preload_instances"][0].pop("config")),
        "daemon: dtype=auto",
    ),
    "quantization": (engine({"quantization": "fp8"}), "Engine: quantization=fp8; daemon: quantization=;?"),
    "tensor": (
        [*both(gpus=GPU[:2]), daemon({"tensor-parallel-size": 2}), engine({"tensor-parallel-size": 1})],
        "Engine: tensor-parallel-size=1; daemon: tensor-parallel-size=2",
    ),
    "kv-cache": (engine({"kv-cache-dtype": "fp8"}), "differs in kv-cache-dtype"),
    "experts": (engine({"enable-expert-parallel": True}), "enable-expert-parallel=True; daemon: .*=False"),
    "user": (variables(vllm_preload_user="other"), "differs in user. Engine: user=vllm; daemon: user=other"),
    "version": (engine(runtime_version="0.32.0"), "Engine: version=0.32.0; daemon: version=0.33.0"),
    "sleep": (engine({"enable-sleep-mode": True}), "enable-sleep-mode and maps .*'base'.*allow_zero_copy_sleep"),
    "mixed": (
        one_more("engine", {**MAPPER, "preload": {"daemon": "base", "mode": "copy"}}),
        "'base' is used by engines chat, code in the modes zero_copy, copy",
    ),
    "two-copies": (
        [preload(mode="copy"), one_more("engine", {**MAPPER, "preload": {"daemon": "base", "mode": "copy"}})],
        "in the modes copy, copy",
    ),
    "engine-name": (engine(name="preload"), "not gate, preload, weights"),
}
# By the daemon's role.
REFUSED_DAEMONS = {
    "twice": (one_more("preload", {**ANOTHER, "name": "base"}), "share a name; names: base, base"),
    "name": (one_more("preload", {**ANOTHER, "name": "Two"}), "'Two' needs a name"),
    "old-version": ([daemon(runtime_version="0.30.1")], "version of vLLM from 0.31 on .is '0.30.1'"),
    "no-version": ([daemon(runtime_version="")], "is ''"),
    "hub": ([daemon(model="org/model")], "has model 'org/model'; it must be an absolute path"),
    "home": (daemon(model="/home/me/model"), "outside /home"),
    "option-reserved": (
        daemon({"weight-cache-socket-dir": "/tmp/x", "seed-token": "x"}),
        "(?=.*in its config: [^.]*seed-token)[^.]*weight-cache-socket-dir",
    ),
    "option-underscore": (daemon({"tensor_parallel_size": 2}), "tensor_parallel_size"),
    "option-empty": (daemon({"revision": None}), "revision"),
    "option-secret": (daemon({"hf-token": TOKEN}), "in its config: hf-token"),
    "daemon-load-format": (daemon({"load-format": "ipc_cache"}), "loads from disk itself"),
    "awq": (both({"quantization": "awq_marlin"}), "quantization 'awq_marlin' .vLLM refuses"),
    "gptq": (both({"quantization": "gptq"}), "quantization 'gptq'"),
    "compressed": (both({"quantization": "compressed-tensors"}), "quantization 'compressed-tensors'"),
    "speculative-text": (both({"speculative-config": '{"method": "eagle"}'}), "a mapping with a method"),
    "speculative-method": (both({"speculative-config": {"model": "/srv/models/draft"}}), "a mapping with a method"),
    "pipeline": (
        [*both({"pipeline-parallel-size": 2}, gpus=GPU[:2]), variables(vllm_runtime_version="0.31.0")],
        "pipeline-parallel-size 2,.* with vLLM 0.31.0.*pipelines need 0.32",
    ),
    "nodes": (both({"tensor-parallel-size": 3, "nnodes": 2}), "nnodes divides"),
    "zero": (both({"tensor-parallel-size": 0}), "at least 1"),
    "no-gpus": ([daemon(gpus=[])], "has gpus none"),
    "index": (both(gpus=["0"]), "has gpus 0,.* 1 rank.s.* UUIDs"),
    "same-gpu": (both({"tensor-parallel-size": 2}, gpus=[GPU[0], GPU[0]]), "as many different UUIDs"),
    "few-gpus": (both({"tensor-parallel-size": 2}), "make 2 rank.s. on this host"),
    "many-gpus": (both(gpus=GPU[:2]), "make 1 rank.s. on this host"),
    "no-address": (
        both({"tensor-parallel-size": 2, "nnodes": 2}),
        "meets the others at '' port 0,.*Next step: set master-addr",
    ),
    "loopback": (
        [
            *both({"data-parallel-size": 2, "data-parallel-size-local": 1, "data-parallel-address": "127.0.0.1"}),
            daemon({"weight-cache-master-port": 29600}),
        ],
        "meets the others at '127.0.0.1'.*Next step: set data-parallel-address",
    ),
    "master-port": (
        [
            *both({"tensor-parallel-size": 2, "nnodes": 2, "master-addr": "10.0.0.1"}),
            daemon({"weight-cache-master-port": 29500, "master-port": 29500}),
        ],
        "not the engine's master-port",
    ),
    "environment": (
        daemon(env={"A-B": "1", "HF_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "1", "N": None, "L": "a\nb"}),
        "environment: A-B, CUDA_VISIBLE_DEVICES, HF_TOKEN, N, L",
    ),
    "seed-half": (daemon(seed={"listen_host": "10.0.0.1", "token": TOKEN}), "listen_host with listen_port"),
    "seed-alone": (daemon(seed={"token": TOKEN}), "has seed options token"),
    "seed-no-token": (daemon(seed={k: v for k, v in SEED.items() if k != "token"}), "token of at least 16"),
    "seed-short-token": (daemon(seed={**SEED, "token": "short"}), "token of at least 16"),
    "seed-dash-token": (daemon(seed={**SEED, "token": f"-{TOKEN}"}), "not begin with a dash"),
    "seed-everywhere": (daemon(seed={**SEED, "listen_host": "0.0.0.0"}), "one address of this host"),
    "seed-ports": (daemon(seed={**SEED, "listen_port": 65536}), "up to 65535"),
    "seed-source-ports": (
        [
            *both({"tensor-parallel-size": 2}, gpus=GPU[:2]),
            daemon(seed={"source_host": "10.0.0.1", "source_port": 65535, "token": TOKEN}),
        ],
        "2 port.s. from each number on",
    ),
    "seed-version": (
        [daemon(seed=SEED), variables(vllm_runtime_version="0.32.0")],
        "with vLLM 0.32.0. They need vLLM 0.33",
    ),
    "method": (daemon(weights={"method": "quick"}), "The method is full or sample"),
    "digest": (daemon(weights={"allowed": ["sha256:abc"]}), "64 hexadecimal digits"),
    "allowed-file": (daemon(weights={"allowed_file": "ok.txt"}), "absolute paths"),
    "signers-alone": (variables(vllm_preload_weights={"allowed_signers": "/etc/keys"}), "signers need a file"),
    "start-timeout": ([daemon(start_timeout=0)], "start_timeout 0 s"),
    "stop-timeout": (variables(vllm_preload_stop_timeout=3), "vllm_preload_stop_timeout is 3 s"),
    "health-port": (daemon(health_port=0), "has the ports 0; they go from 1"),
    "health-twice": (one_more("preload", {**ANOTHER, "health_port": 8101}), "8101 used by base, 8101 used by two"),
    "health-gate": (daemon(health_port=8001), "8001 used by base, 8001 used by chat"),
    "seed-health": (daemon(seed={**SEED, "listen_port": 8101}), "8101 used by base, 8101 used by base"),
}
REFUSED = REFUSED_ENGINES | REFUSED_DAEMONS


def case(changes):
    value = copy.deepcopy(GOOD)
    for one in changes if isinstance(changes, list) else [changes]:
        one(value)
    return value


def refusal(name, changes):
    value = case(changes)
    return Role("vllm_engine", value, name).refusal() or Role("vllm_preload", value, name).refusal()


@pytest.mark.parametrize(
    ("role", "name"),
    [("vllm_engine", name) for name in REFUSED_ENGINES] + [("vllm_preload", name) for name in REFUSED_DAEMONS],
)
def test_refused_with_host_name_limit_and_next_step(role, name):
    changes, says = REFUSED[name]
    text = Role(role, case(changes), name).refusal()
    assert text, "was accepted"
    text = " ".join(text.split())
    assert text.startswith(f"{name}: ")
    assert re.search(says, text), text
    assert "Next step: " in text
    assert TOKEN not in text


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    assert refusal(name, ACCEPTED[name]) is None


@pytest.mark.long
def test_a_real_run_says_the_same(tmp_path):
    names = ["good", "good-seed", "unknown-daemon", "dtype", "mixed", "seed-short-token", "health-twice"]
    cases = {name: ACCEPTED.get(name) or REFUSED.get(name, [[]])[0] for name in names}
    (tmp_path / "inventory.yml").write_text(
        yaml.safe_dump(
            {
                "all": {
                    "hosts": {name: case(changes) for name, changes in cases.items()},
                    "vars": {"out": str(tmp_path), "vllm_runtime_version": "0.33.0"},
                }
            }
        )
    )
    (tmp_path / "play.yml").write_text(PLAY)
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "--inventory", tmp_path / "inventory.yml", "-vv",
         tmp_path / "play.yml"],
        env={**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True, text=True, check=False, timeout=300, cwd=CHECKOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
    for name, changes in cases.items():
        said = None
        if (tmp_path / name).exists():
            result = json.loads((tmp_path / name).read_text())
            (said,) = {one["msg"] for one in result.get("results", [result]) if one.get("failed")}
        assert refusal(name, changes) == said
        assert (said is None) == (name in ACCEPTED)


@pytest.fixture
def rendered():
    def render(name, role, template, **variables):
        value = case(ACCEPTED[name]) | variables
        text = Role(role, value, name).render(template, "chat" if role == "vllm_engine" else "base")
        return json.loads(text) if ".json" in template else yaml.safe_load(text) if ".yaml" in template else text

    return render


def test_what_the_library_reads_of_a_daemon(rendered):
    value = rendered("good", "vllm_preload", "lifecycle.json.j2")
    digest = value.pop("config_digest")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    directory = value["socket_dir"]
    assert re.fullmatch("/run/vllm/[A-Z]{3}", directory)
    assert value == {
        "schema": 1,
        "daemon": "base",
        "unit": "vllm-preload@base.service",
        "user": "vllm",
        "runtime": "/opt/vllm/preload/base",
        "runtime_version": "0.33.0",
        "model": "/srv/models/m",
        "socket_dir": directory,
        "sockets": [f"vllm_weight_cache_{hashlib.md5(GPU[0].encode()).hexdigest()}.sock"],
        "health_port": 8101,
        "start_timeout": 900.0,
        "gpus": [GPU[0]],
        "engines": ["chat"],
        "weights": {"method": "full", "allowed": [], "allowed_file": "", "allowed_signers": ""},
        "traits": {
            "dtype": "bfloat16",
            "quantization": "",
            "load_format": "auto",
            "revision": "",
            "kv_cache_dtype": "auto",
            "lora": False,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "data_parallel": 1,
            "expert_parallel": False,
        },
    }


def test_what_the_library_reads_of_an_engine(rendered):
    value = rendered("good", "vllm_engine", "lifecycle.json.j2")
    expected = {"daemon": "base", "mode": "zero_copy", "fallback": False, "allow_zero_copy_sleep": False, "wait": 900.0}
    assert value["preload"] == expected
    assert value["sleep_mode"] is False
    assert value["traits"] == rendered("good", "vllm_preload", "lifecycle.json.j2")["traits"]
    value = rendered("good-copy", "vllm_engine", "lifecycle.json.j2")
    assert value["preload"] == {**expected, "mode": "copy", "fallback": True, "wait": 30.0}
    assert value["sleep_mode"] is True
    assert rendered("good-sleep", "vllm_engine", "lifecycle.json.j2")["preload"]["allow_zero_copy_sleep"] is True
    assert rendered("good-plain", "vllm_engine", "lifecycle.json.j2")["preload"] is None


def test_sizes_and_rules_reach_the_library(rendered):
    value = rendered("good-experts", "vllm_preload", "lifecycle.json.j2")
    assert value["traits"]["data_parallel"] == 4
    assert value["traits"]["expert_parallel"] is True
    assert len(value["sockets"]) == 4
    value = rendered("good-parallel", "vllm_preload", "lifecycle.json.j2")
    assert (value["traits"]["tensor_parallel"], value["traits"]["pipeline_parallel"]) == (2, 2)
    value = rendered("good-weights", "vllm_preload", "lifecycle.json.j2")
    assert value["weights"] == {
        "method": "sample",
        "allowed": ["sha256:" + "0" * 64],
        "allowed_file": "/etc/ok",
        "allowed_signers": "",
    }


def test_a_draft_has_sockets_of_its_own(rendered):
    name = hashlib.md5(GPU[0].encode()).hexdigest()
    sockets = rendered("good-drafts", "vllm_preload", "lifecycle.json.j2")["sockets"]
    assert sockets == [f"vllm_weight_cache_{name}.sock", f"vllm_weight_cache_{name}_draft.sock"]


@pytest.mark.parametrize("name", ["good", "good-drafts"])
def test_the_longest_socket_path_fits_also_where_md5_is_forbidden(rendered, name):
    value = rendered(name, "vllm_preload", "lifecycle.json.j2", ansible_facts={"fips": True})
    paths = [f"{value['socket_dir']}/{socket}" for socket in value["sockets"]]
    assert hashlib.sha256(GPU[0].encode()).hexdigest() in paths[0]
    assert max(map(len, paths)) <= 107
    if name == "good-drafts":
        assert max(map(len, paths)) == 107, "there is room for a longer, and plainer, directory"


def test_engine_and_daemon_agree_on_the_directory(rendered):
    for name in ("base", "q", "llama-3-70b-instruct-0123456789"):
        daemons = [{**GOOD["vllm_preload_instances"][0], "name": name}]
        engines = [{**GOOD["vllm_engine_instances"][0], "preload": {"daemon": name}}]
        variables = {"vllm_preload_instances": daemons, "vllm_engine_instances": engines}
        options = rendered("good", "vllm_engine", "engine.yaml.j2", **variables)
        item = Role("vllm_preload", {**copy.deepcopy(GOOD), **variables}, "good")
        directory = json.loads(item.render("lifecycle.json.j2", name))["socket_dir"]
        assert json.loads(options["model-loader-extra-config"])["socket_dir"] == directory


def test_what_vllm_reads(rendered):
    directory = rendered("good", "vllm_preload", "lifecycle.json.j2")["socket_dir"]
    assert rendered("good", "vllm_preload", "options.yaml.j2") == {
        "model": "/srv/models/m",
        "dtype": "bfloat16",
        "weight-cache-socket-dir": directory,
        "weight-cache-health-host": "127.0.0.1",
        "weight-cache-health-port": 8101,
    }
    options = rendered("good", "vllm_engine", "engine.yaml.j2")
    assert options["load-format"] == "ipc_cache"
    loader = {"socket_dir": directory, "mode": "zero_copy", "fallback": False}
    assert json.loads(options["model-loader-extra-config"]) == loader
    options = rendered("good-copy", "vllm_engine", "engine.yaml.j2")
    assert json.loads(options["model-loader-extra-config"]) == {**loader, "mode": "copy", "fallback": True}
    plain = rendered("good-plain", "vllm_engine", "engine.yaml.j2")
    assert {"load-format", "model-loader-extra-config"} & set(plain) == set()
    assert rendered("good-nodes", "vllm_preload", "options.yaml.j2")["weight-cache-master-port"] == 29600
    seed = rendered("good-seed", "vllm_preload", "options.yaml.j2")
    assert {key: value for key, value in seed.items() if key.startswith("seed-")} == {
        "seed-listen-host": "10.0.0.1",
        "seed-listen-port": 29700,
        "seed-token": TOKEN,
    }


def test_environment(rendered):
    def read(name):
        lines = rendered(name, "vllm_preload", "preload.env.j2").splitlines()
        return dict(line.split("=", 1) for line in lines if not line.startswith("#"))

    one = read("good")
    assert one["CUDA_VISIBLE_DEVICES"] == f'"{GPU[0]}"'
    assert one["CUDA_DEVICE_ORDER"] == '"PCI_BUS_ID"'
    assert one["NCCL_SOCKET_IFNAME"] == '"lo"'
    assert read("good-nodes").keys() & {"NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"} == set()
    assert read("good-parallel")["CUDA_VISIBLE_DEVICES"] == '"' + ",".join(GPU[:4]) + '"'
    assert read("good-seed")["HF_TOKEN"] == r'"quo\"te\$"'


def settings(text):
    """Unit settings by name, comments left out; of a name that stands there twice, both."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            found.setdefault(line.partition("=")[0], []).append(line.partition("=")[2])
    return found


def test_the_daemons_unit(rendered):
    unit = settings(rendered("good", "vllm_preload", "vllm-preload@.service.j2"))
    drop_in = settings(rendered("good", "vllm_preload", "instance.conf.j2"))
    door = "+/opt/vllm/control/bin/vllm-lifecycle preload-"
    assert unit["ExecStartPre"] == [f"{door}preflight %i"]
    assert unit["ExecStartPost"] == [f"{door}ready %i"]
    assert unit["ExecStopPost"] == [f"{door}settle %i"]
    assert unit["Type"] == ["exec"]
    assert unit["SuccessExitStatus"] == ["241 143"]
    assert unit["Restart"] == ["no"]
    assert unit["PrivateTmp"] == ["no"]
    assert unit["RuntimeDirectoryMode"] == ["0700"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert unit["LimitMEMLOCK"] == ["infinity"]
    directory = rendered("good", "vllm_preload", "lifecycle.json.j2")["socket_dir"]
    assert drop_in["RuntimeDirectory"] == [directory.removeprefix("/run/")]
    # CUDA IPC needs what these would take away.
    assert unit.keys() & {"PrivateIPC", "PrivateUsers", "PrivatePIDs", "PrivateDevices", "PrivateNetwork"} == set()
    assert unit.keys() & {"ProcSubset", "RemoveIPC", "TemporaryFileSystem", "MemoryDenyWriteExecute"} == set()


def test_both_units_run_as_one_user(rendered):
    variables = {"vllm_engine_user": "llm", "vllm_preload_user": "llm"}
    units = [
        settings(rendered("good", "vllm_preload", "vllm-preload@.service.j2", **variables)),
        settings(rendered("good", "vllm_engine", "vllm-engine@.service.j2", **variables)),
    ]
    assert [unit["User"] for unit in units] == [["llm"], ["llm"]]
    for unit in units:
        assert unit.keys() & {"PrivateIPC", "PrivateUsers", "PrivatePIDs", "PrivateDevices", "RemoveIPC"} == set()


def test_an_engine_is_ordered_after_its_daemon_and_not_bound_to_it(rendered):
    drop_in = settings(rendered("good", "vllm_engine", "instance.conf.j2"))
    assert drop_in["After"] == drop_in["Wants"] == ["vllm-preload@base.service"]
    assert drop_in.keys() & {"Requires", "BindsTo", "PartOf", "Requisite", "Upholds", "PropagatesStopTo"} == set()
    assert drop_in["RequiresMountsFor"] == ["/srv/models/m"]
    plain = settings(rendered("good-plain", "vllm_engine", "instance.conf.j2"))
    assert plain.keys() & {"After", "Wants"} == set()


def test_no_secret_outside_the_files_that_root_alone_reads(rendered):
    for template in ("lifecycle.json.j2", "vllm-preload@.service.j2", "instance.conf.j2"):
        text = json.dumps(rendered("good-seed", "vllm_preload", template))
        assert TOKEN not in text
        assert 'quo"te' not in text
    tasks = yaml.safe_load((CHECKOUT / "roles/vllm_preload/tasks/configure.yml").read_text())
    modes = {}
    for task in tasks:
        options = task.get("ansible.builtin.template", {})
        if options.get("src") in ("options.yaml.j2", "preload.env.j2"):
            secret = task.get("no_log"), task.get("diff")
            modes.setdefault(options["src"], []).append((options["mode"], task.get("when"), *secret))
    assert modes["preload.env.j2"] == [("0600", None, True, False)]
    assert modes["options.yaml.j2"] == [
        ("0600", "__vllm_preload_seed | length == 0", None, None),
        ("0600", "__vllm_preload_seed | length > 0", True, False),
    ]


@pytest.mark.parametrize(
    "role,line",
    [
        *(("both", line) for line in ("PrivateIPC=yes", "PrivateUsers=yes", "PrivateDevices=yes", "PrivatePIDs=yes")),
        ("both", "IPCNamespacePath=/run/ns"),
        ("both", "RootDirectory=/srv/root"),
        ("both", "TemporaryFileSystem=/dev/shm"),
        ("both", "TemporaryFileSystem=/tmp /dev/shm:rw"),
        ("both", "InaccessiblePaths=/run/vllm"),
        ("both", "BindPaths=/srv/shm:/dev/shm:rbind"),
        ("both", "DynamicUser=yes"),
        ("both", "RemoveIPC=yes"),
        ("both", "User=root"),
        ("both", "User="),
        ("daemon", "PrivateTmp=yes"),
        ("daemon", "PrivateNetwork=yes"),
        ("daemon", "Restart=on-failure"),
        ("daemon", "RuntimeDirectoryMode=0755"),
        ("none", "PrivateIPC=no"),
        ("none", "PrivateTmp=no"),
        ("none", "Restart=no"),
        ("none", "User=vllm"),
        ("none", "RuntimeDirectoryMode=0700"),
        ("none", "IPCNamespacePath="),
        ("none", "RootDirectory="),
        ("none", "BindPaths="),
        ("none", "BindPaths=/srv/models:/srv/models:rbind"),
        ("none", "WantedBy=multi-user.target"),
    ],
)
def test_settings_that_separate_daemon_and_engine_are_found(role, line):
    def finds(name, variable, shown):
        one = Role(name, case([]), "good")
        return bool(re.match(one.template(TEXT("{{ " + variable + " }}")), line))

    assert finds("vllm_preload", "__vllm_preload_forbidden", "__vllm_preload_shown") is (role != "none")
    assert finds("vllm_engine", "__vllm_engine_forbidden", "__vllm_engine_shown") is (role == "both")


def test_the_digest_follows_what_a_process_reads_and_nothing_else(rendered):
    def digest(**keys):
        daemons = [{**GOOD["vllm_preload_instances"][0], **keys}]
        return rendered("good", "vllm_preload", "lifecycle.json.j2", vllm_preload_instances=daemons)["config_digest"]

    same = digest()
    assert digest(start_timeout=5) == same
    assert digest(weights={"method": "sample"}) == same
    others = [
        digest(config={"dtype": "float16"}),
        digest(env={"A": "1"}),
        digest(secret_env={"B": "1"}),
        digest(runtime_version="0.33.1"),
        digest(health_port=8109),
        digest(model="/srv/models/other"),
        digest(seed=SEED),
        digest(gpus=[GPU[1]]),
    ]
    assert len({same, *others}) == 1 + len(others)
