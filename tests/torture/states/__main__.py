"""Runs the cases of one seed, or of several after it, and prints what is wrong."""

from __future__ import annotations

import argparse
import sys
import time

from .judge import make_case
from .trial import run_cases


def main() -> int:
    """The program `python -m torture.states`; returns its exit code."""
    parser = argparse.ArgumentParser(prog="torture.states", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    if options.cases == 1:
        print(make_case(options.seed))
    began = time.monotonic()
    seeds = range(options.seed, options.seed + options.cases)
    result = run_cases(seeds, began + options.seconds)
    for each in result.violations:
        print(each)
    seconds = time.monotonic() - began
    print(f"{result.tried} tried in {seconds:.1f} s, {len(result.violations)} cases are wrong")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
