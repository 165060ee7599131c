#!/usr/bin/env bash
# Predicted against measured memory on this GPU, in under 8 minutes; status 85: run it again to continue. Writes
# to docs/results/ or the folder given first; the rest goes to scripts/benchmarks/memory_accuracy.py. PYTHON: which one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
exec "${PYTHON:-python3}" scripts/benchmarks/memory_accuracy.py --device cuda --budget_seconds 400 --write \
    --output_dir "${1:-docs/results}" "${@:2}"
