#!/usr/bin/env bash
# Half an hour on a GPU in order of value, in pieces of under 8 minutes; run it again until it says done. --dry_run
# shows the pieces, --help the rest. PYTHON chooses the interpreter; torch, transformers, accelerate and numpy suffice
# to measure. Tests and whole runs also need datasets, evaluate, dill and multiprocess, and losses gain by liger-kernel:
#   bash scripts/gpu_session.sh wheels DIR [bitsandbytes ...]  downloads these where there is a network, for Python 3.12
#   bash scripts/gpu_session.sh --wheels DIR                   installs them next to the figures where there is none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
exec "${PYTHON:-python3}" scripts/benchmarks/gpu_session.py "$@"
