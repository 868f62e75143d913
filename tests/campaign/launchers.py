"""A stand-in for `outlast run` and its training, which is right or wrong as its script's name says.

It "trains" in one process, as fast as files can be written, and resumes after its last step.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from outlast.campaign.notes import END, ENTRY, STEP, Progress, notes_in
from outlast.events.emitter import JsonlSink
from outlast.events.event import Note

COMMAND = (sys.executable, __file__)
STOPPED_AT = 5


def main(arguments: list[str]) -> int:
    """Runs to the end, or to the signal that ends it."""
    options = dict(a.removeprefix("--").split("=", 1) for a in arguments if a.startswith("--"))
    script = Path(next(a for a in arguments if not a.startswith("--"))).name
    work, steps = Path(options["folder"]), int(options["steps"])
    folder = work.parent
    (folder / "events").mkdir(exist_ok=True)
    (folder / "events" / "launcher.jsonl").write_text('{"kind": "note", "name": "stand-in"}\n')
    progress = Progress(folder, own=True)
    progress.update()
    notes = JsonlSink(notes_in(work))

    def note(name: str, rank: int, **data: object) -> None:
        notes.write(Note(name=name, rank=rank, pid=1, data=data))

    ranks = int(options["nproc-per-node"]) * int(options.get("nnodes", 1))
    disturbed = (folder.name != "reference") and not progress.last
    for number in range(6):
        grown = 20 * number if disturbed and script == "leaks" else 0
        note(ENTRY, 0, descriptors={"socket": grown}, threads=1)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for step in range(progress.last + 1, steps + 1):
        wrong = disturbed and "wrong_loss" in script and step == 2
        for rank in range(ranks):
            loss = 1.0 / (step + rank + 1) * (1 + wrong * 2**-52)
            note(STEP, rank, step=step, loss=loss.hex())
        while disturbed and "waits" in script and step == STOPPED_AT and not stopped:
            time.sleep(0.01)  # until it is stopped or killed; the undisturbed run does not wait
        if disturbed and "slow" in script:
            time.sleep(0.1)
        if stopped:
            return 143
        if script == "fails":
            print("the last words")
            return 3
        while script == "stalls":
            time.sleep(1)
    for rank in range(ranks):
        weights = "other" if disturbed and script == "wrong_weights" else "same"
        note(END, rank, steps=steps, samples=1, weights=weights, optimizer="same")
    if disturbed and script == "leaves_a_process":
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
    if disturbed and script == "leaves_a_file":
        import tempfile

        Path(tempfile.mkdtemp(), "left").touch()
    if disturbed and script == "leaves_a_save":
        (work / "checkpoints" / ".tmp-step-00000003-x").mkdir(parents=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
