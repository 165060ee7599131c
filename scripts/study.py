#!/usr/bin/env python3
"""How sequence length and micro-batch size trade against memory and speed, with and without each technique.

    python scripts/study.py --config recipes/quickstart.yaml --lengths 512,1024,2048,4096 --micro_batch_sizes 1,2,4
    python scripts/study.py --help

The study itself is in ``scripts/benchmarks/study/``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.benchmarks.study.run import main

if __name__ == "__main__":
    raise SystemExit(main())
