"""The in-process restart of Megatron-LM, from its wheels, runs with `outlast.compat.nvrx`."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ports.port_run import PortRun

SCRIPT = Path(__file__).parent / "megatron_training.py"
OPTIONS = ["--inprocess-restart", "--inprocess-granularity", "rank", "--async-strategy", "mcore"]
# The oldest wheel that has `megatron.training`, and the newest.
VERSIONS = ("0.17.0", "0.19.2")
EXCEPTION = {"faults": [{"rank": 0, "kind": "exception", "step": 10}]}
# What Megatron-core asks of the package when it is imported, and what it takes for its saves.
PROBES = """
import importlib.util, random, sys, warnings
warnings.simplefilter("ignore")
import outlast.compat.nvrx
outlast.compat.nvrx.install()
sys.path.insert(0, sys.argv[1])
import nvidia_resiliency_ext
from megatron.core.dist_checkpointing import tensor_aware_state_dict
from megatron.core.dist_checkpointing.strategies import torch as strategy
from megatron.training import async_utils, inprocess_restart
print(nvidia_resiliency_ext.__version__, strategy.HAVE_NVRX, tensor_aware_state_dict.HAVE_NVRX)
strategy.get_async_strategy("mcore")
if importlib.util.find_spec("megatron.core.fault_injector"):  # since 0.18
    from megatron.core import fault_injector
    assert fault_injector.has_nvidia_resiliency_ext
    fault_injector.rng = random.Random(0)
    config = fault_injector.FaultInjectorConfig(fault_injector_fault_types="sigkill")
    assert fault_injector.get_fault(config).name == "SIGKILL"
try:
    strategy.get_async_strategy("nvrx")
except ModuleNotFoundError as e:
    print(e)
"""


@pytest.fixture(params=VERSIONS)
def megatron(request: pytest.FixtureRequest) -> Path:
    """The folder of one version, which `make test-ports` installs outside of `sys.path`."""
    folder = Path(sys.prefix) / "megatron" / request.param
    if not folder.exists():
        pytest.skip(f"needs Megatron-core {request.param}: make test-ports")
    newest = request.param == VERSIONS[-1]
    if newest and (sys.version_info < (3, 12) or not importlib.util.find_spec("triton")):
        pytest.skip("needs Python 3.12 and triton: make test-ports PYTHON=python3.12 TRITON=triton")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)  # beside other tests, the imports take minutes
def test_what_megatron_looks_for_at_import_is_there_or_cleanly_missing(megatron: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROBES, megatron], capture_output=True, text=True, timeout=850
    )
    assert found.returncode == 0, found.stderr
    said = found.stdout.splitlines()
    assert said[-2] == "0.4.1 False False"
    assert "set `async_strategy` to `mcore`" in said[-1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_megatrons_restart_survives_an_exception_and_kills(tmp_path: Path, megatron: Path) -> None:
    script = [str(SCRIPT), str(megatron), *OPTIONS, "--inprocess-active-world-size", "2"]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    (undisturbed / "go").touch()
    with PortRun(undisturbed, script, ["--nproc-per-node", "3"]) as run:
        assert run.wait() == 0, run.tail
        expected = run.losses()
    assert {rank for rank, _ in expected} == {0, 1}  # rank 2 is the reserve

    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(EXCEPTION))
    with PortRun(disturbed, script, ["--nproc-per-node", "3", "--chaos", str(plan)]) as run:
        run.wait_for_text("ChaosError")
        run.wait_for_text("[1] step 12:")
        run.send(1, signal.SIGKILL)
        run.wait_for_text("[2] step")  # the reserve has taken the place
        run.wait_for_text("[1] ready")
        run.send(2, signal.SIGKILL)
        run.wait_for_text("[1] step")  # and the replacement that of the reserve
        run.wait_for_text("[2] ready")  # it opens rank 0's store, so rank 0 must not end before
        (disturbed / "go").touch()
        assert run.wait() == 0, run.tail
        found = run.losses()
        told = [line.partition("state=")[2] for line in run.lines if "[NestedRestarter]" in line]
    for (_, step), values in found.items():
        assert values == expected[0, step], step
    assert {step for _, step in found} == {step for _, step in expected}
    # Three faults, and perhaps one more restart that admits the second replacement.
    restart = ["handling stage=starting", "handling stage=completed"]
    assert told in (["initialize", *n * restart, "finalized"] for n in (3, 4))
