"""The benchmarks: `python -m benchmarks`. Each module measures one promise; see `__main__.py`."""

import os
import warnings

# torch logs every wait for a key that times out, and the peer's are made to: thousands of lines.
# Read when torch is loaded, so it stands before any import.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch says this when it is imported beside the peer, whose requirement it is.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
