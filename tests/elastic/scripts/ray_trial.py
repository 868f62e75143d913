"""Two Ray Tune trials: `python ray_trial.py FOLDER`. One fails once, and continues."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune

from elastic.text_state import Text
from outlast.elastic import CounterState, from_ray, load_all_states, load_state, save_all_states


def trial(config: dict[str, Any]) -> None:
    """Six steps, a save after each; the process dies after the third, once."""
    assert from_ray()
    counters, text = CounterState(), Text("a/b", config["text"])
    began_at = 0
    if load_all_states():
        began_at = counters.step
        assert text.text == f"{config['text']} {counters.step}"
    else:
        assert not load_state(counters)
    died = Path(config["folder"]) / f"died-{config['text']}"
    while counters.step < 6:
        counters.step += 1
        text.text = f"{config['text']} {counters.step}"
        asynchronous = counters.step % 2 == 0
        metrics = {"step": counters.step, "began_at": began_at}
        saved: Any = save_all_states(asynchronous, metrics=metrics)
        where = saved.directory if asynchronous else saved
        assert config["storage"] in where
        assert [each.name for each in Path(where).glob("states/step-*")] == ["step-00000001"]
        text.text = "changed"
        assert load_state(text)  # what was just saved
        assert text.text.endswith(str(counters.step))
        if config["dies"] and counters.step == 3 and not died.exists():
            died.touch()
            os._exit(1)


def main(folder: Path) -> None:
    assert not from_ray()
    folder.mkdir()
    # A trial must ignore a checkpoint in the environment and use Ray's.
    os.environ["OUTLAST_CHECKPOINT_PATH"] = str(folder / "not here")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    storage = str(folder / "storage")
    tuner = tune.Tuner(
        trial,
        param_space={
            "text": tune.grid_search(["x", "y"]),
            "dies": tune.sample_from(lambda config: config["text"] == "x"),
            "folder": str(folder),
            "storage": storage,
        },
        run_config=tune.RunConfig(
            name="states",
            storage_path=storage,
            failure_config=tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
    )
    results = {result.config["text"]: result for result in tuner.fit()}  # type: ignore[index]
    assert results["x"].metrics["began_at"] == 3, results["x"].metrics
    assert results["y"].metrics["began_at"] == 0, results["y"].metrics
    assert {result.metrics["step"] for result in results.values()} == {6}
    assert not (folder / "not here").exists()
    ray.shutdown()
    print("all is well")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)  # Ray's own processes end with this one
    main(Path(sys.argv[1]))
