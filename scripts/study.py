#!/usr/bin/env python3
"""The tables that people make by hand, each one command; ``--help`` lists those of scripts/benchmarks/study/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.benchmarks.study import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
