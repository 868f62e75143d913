"""A program as it is written for AdaptDL's checkpoints. Only its two imports were changed:

import adaptdl.checkpoint as checkpoint
import adaptdl.env as env
"""

import os
import pickle
import signal
import sys

import outlast.elastic as checkpoint
import outlast.elastic as env


class Progress(checkpoint.State):
    def __init__(self):
        super().__init__("progress")
        self.steps = 0
        self.sizes = []

    def sync(self):
        self.synced = True

    def save(self, fileobj):
        assert self.synced
        assert env.replica_rank() == 0
        pickle.dump((self.steps, self.sizes), fileobj)

    def load(self, fileobj):
        self.steps, self.sizes = pickle.load(fileobj)


class Nothing(checkpoint.State):
    """A state that is only synchronized."""

    def sync(self):
        self.synced = True


def main():
    progress = Progress()
    nothing = Nothing("nothing")
    loaded = checkpoint.load_state(progress)
    assert loaded == (env.num_restarts() > 0)
    assert checkpoint.load_state(nothing) == loaded
    progress.sizes.append(env.num_replicas())
    while progress.steps < 10:
        progress.steps += 1
        if progress.steps == 2 + 3 * env.num_restarts() and progress.steps < 10:
            checkpoint.save_all_states()
            checkpoint.save_all_states()  # AdaptDL cannot do this twice in a restart
            if env.replica_rank() == 0:
                assert env.checkpoint_path() is not None
                checkpoint.save_state(progress, os.environ["OWN_FOLDER"], sync=False)
            sys.exit(143)
    print("done", progress.steps, progress.sizes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()
