#!/usr/bin/env bash
# Predicted against measured memory on the GPU of this machine, in under 8 minutes. PYTHON chooses the interpreter;
# torch, transformers, accelerate, tyro and matplotlib are enough. Writes docs/results/memory_accuracy-<card>.json and
# .md, or to the folder given as the first argument; further arguments go to scripts/benchmarks/memory_accuracy.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
"$python" -c '
try:
    import torch
except ImportError:
    raise SystemExit("this Python has no torch: run bash scripts/setup.sh, or set PYTHON")
if not torch.cuda.is_available():
    raise SystemExit("no CUDA device here: scripts/benchmarks/memory_accuracy.py --device cpu compares on a CPU")'
folder=${1:-docs/results}
[ $# -gt 0 ] && shift
exec "$python" scripts/benchmarks/memory_accuracy.py --device cuda --budget_seconds 400 \
    --write --output_dir "$folder" "$@"
