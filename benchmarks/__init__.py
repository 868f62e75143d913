"""The benchmarks: `python -m benchmarks`. See `__main__.py`."""

import os
import warnings

# torch logs every store wait that times out; the peer's waits do so by design, thousands of times.
# torch reads this variable on import, so it is set before any import.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch warns about this package, which the peer requires.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
