"""A job of one rank, with or without a process group: after an exception it goes on with the step
that it had, as several ranks do, and what it was saving is committed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from zygote import shared

pytestmark = pytest.mark.usefixtures("zygote")

SCRIPT = """
import sys
import torch, torch.distributed as dist, outlast
from outlast import inprocess
failed = []
@inprocess.Wrapper()
def main():
    if sys.argv[2] == "group":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with outlast.Job(sys.argv[1], model=model, optimizer=optimizer, every=6) as job:
        first = job.restore()
        print("restored", first, job.restored_from or "nothing", flush=True)
        for step in range(first, 12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            job.step()
            if step == 7 and not failed:
                failed.append(1)
                raise RuntimeError("an injected fault")
        print("ended", [value.hex() for value in model.weight.flatten().tolist()], flush=True)
    print([each.step for each in job.checkpointer.checkpoints()])
main()
"""


def ended(script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        return shared().run([sys.executable, file.name, *arguments], env, **options)


def staying(script: str) -> str:
    """The script with a model and an optimizer that are made once."""
    a, b = script.index("    torch.manual_seed(0)\n"), script.index("    with outlast")
    made = script[a:b].replace("\n    ", "\n").strip()
    return (script[:a] + script[b:]).replace("\n@inprocess", f"\n{made}\n@inprocess")


@pytest.mark.slow
@pytest.mark.parametrize("group", ["alone", pytest.param("group", marks=pytest.mark.slow)])
def test_one_rank_keeps_its_step(tmp_path: Path, group: str) -> None:
    def run(folder: str, script: str) -> list[str]:
        done = ended(script, str(tmp_path / folder), group)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    began, *undisturbed = run("a", SCRIPT.replace("failed = []", "failed = [1]"))
    assert run("b", SCRIPT) == [began, "restored 8 live", *undisturbed]


def test_a_fault_in_an_evaluation_of_a_model_that_stays(tmp_path: Path) -> None:
    """The model is made once, so it would stay in the mode of the evaluation."""
    layers = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))"
    script = staying(SCRIPT.replace("torch.nn.Linear(4, 1)", layers))
    script = script.replace("model.weight", "model[2].weight")
    script = script.replace("raise RuntimeError", "model.eval(); raise RuntimeError")
    plain = ended(script.replace("failed = []", "failed = [1]"), str(tmp_path / "a"), "alone")
    done = ended(script, str(tmp_path / "b"), "alone")
    assert "restored 8 live" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-2:] == plain.stdout.splitlines()[-2:]


@pytest.mark.parametrize("after", ["unscale_", pytest.param("step", marks=pytest.mark.slow)])
def test_a_fault_in_the_midst_of_the_step_of_a_scaler_that_stays(
    tmp_path: Path, after: str
) -> None:
    """Else the next step raises: "unscale_() has already been called on this optimizer"."""
    train = f"""
scaler = torch.amp.GradScaler("cpu")
def train(loss):
    scaler.scale(loss).backward()
    for each in (scaler.unscale_, scaler.step):
        each(optimizer)
        if each.__name__ == "{after}" and scaler._get_growth_tracker() == 7 and not failed:
            failed.append(1)
            raise RuntimeError("an injected fault")
    scaler.update()
@inprocess"""
    script = staying(SCRIPT).replace("\n@inprocess", train)
    script = script.replace("every=6", "every=6, states={'scaler': scaler}")
    script = script.replace("model(torch.randn(8, 4)).square().mean().backward()", "train(LOSS)")
    script = script.replace("LOSS", "model(torch.randn(8, 4)).square().mean()")
    script = script.replace("            optimizer.step()\n", "")
    done = ended(script, str(tmp_path), "alone")
    assert "ended" in done.stdout, done.stderr
    assert "completed after 1 restart" in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["live", pytest.param("storage", marks=pytest.mark.slow)])
def test_a_parameter_that_is_not_trained_any_more_is_named(tmp_path: Path, how: str) -> None:
    script = SCRIPT.replace(
        "    optimizer = ", "    model.bias.requires_grad = False\n    optimizer = "
    )
    script = script.replace(
        "            optimizer.zero",
        """
            if step == 2:
                model.bias.requires_grad = True
            optimizer.zero""",
    )
    if how == "storage":
        script = script.replace("failed = []", "failed = [1]")
        ended(script.replace("range(first, 12)", "range(first, 8)"), str(tmp_path), "alone")
    done = ended(script, str(tmp_path), "alone")
    assert f"restored 8 {how}" in done.stdout, done.stderr
    assert "and are not in step 9: bias. What" in done.stderr
    assert done.stderr.count("were trained in the state") == 1


def test_a_job_in_another_folder_after_a_restart(tmp_path: Path) -> None:
    named = "outlast.Job(os.path.join(sys.argv[1], str(time.monotonic()))"
    script = "import os, time\n" + SCRIPT.replace("outlast.Job(sys.argv[1]", named)
    done = ended(script, str(tmp_path), "alone")
    assert done.returncode == 93, done.stderr
    assert "after a restart in place, the job's folder is " in done.stderr
    assert "step 8, the newest one that the ranks had, is saved now (" in done.stderr
    saved = sorted(each.name for each in tmp_path.glob("*/step-*"))
    assert saved == ["step-00000006", "step-00000008"]


def test_a_relative_folder_and_another_working_directory(tmp_path: Path) -> None:
    leaves = "os.mkdir('x'); os.chdir('x'); raise RuntimeError"
    script = "import os\n" + SCRIPT.replace("raise RuntimeError", leaves)
    done = ended(script, "checkpoints", "alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "restored 8 live" in done.stdout
