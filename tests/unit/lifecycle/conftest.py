# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host with engines that serve, for each test or module that asks for one."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.unit.lifecycle import world as worlds

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """httpcore leaves the socket of a refused connection to the garbage collector, which Python warns of.

    Dozens of processes make one of these hosts, and some tests begin something while another thing is under way. On a
    busy machine that can come too late, so each has a second try, which the summary names.
    """
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="module", autouse=True)
def leave_no_garbage():
    """Nor let it come to later tests."""
    yield
    gc.collect()


@contextlib.contextmanager
def builder(monkeypatch):
    """`build(gate=True, gpus=1, fault=["sleep_noop"])` is a host whose engine ``chat`` serves.

    With ``doors`` (True, or some of them by name) the unit calls the product's command; ``declared`` changes the
    engine's declaration, ``unit`` its unit; ``spread`` gives each engine a GPU of its own; other keywords are options
    of `vllm serve`.
    """
    built = []

    def build(
        *,
        gate=False,
        gpus=0,
        engines=("chat",),
        total=143771,
        version="0.33.0",
        doors=False,
        dev_mode=True,
        fault=(),
        declared=None,
        unit=None,
        start=True,
        spread=False,
        **options,
    ):
        root = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))  # short: a socket's path has 107 characters at most
        host = worlds.World(root, gate, gpus, tuple(engines), total)
        built.append(host)
        worlds.use(monkeypatch, host)
        for index, engine in enumerate(host.engines.values()):
            host.declare(
                engine,
                version=version,
                doors=doors,
                dev_mode=dev_mode,
                fault=list(fault),
                declared=declared or {},
                unit=unit or {},
                uuids=host.gpu.uuids[index : index + 1] if spread else host.gpu.uuids,
                **options,
            )
        if start:
            host.start()
        return host

    try:
        yield build
    finally:
        for host in built:
            host.close()


@pytest.fixture
def world(monkeypatch, run_module):
    with builder(monkeypatch) as build:

        def with_modules(**settings):
            host = build(**settings)
            host.run_module = run_module
            return host

        yield with_modules


@pytest.fixture(scope="module")
def module_world():
    """The same for a whole module; whoever runs a module there sets ``run_module`` first."""
    with pytest.MonkeyPatch.context() as monkeypatch, builder(monkeypatch) as build:
        yield build
