#!/usr/bin/env bash
# Half an hour on a GPU in order of value, in pieces of under 8 minutes; run it again until it says done. --dry_run
# shows the pieces, --help the rest; PYTHON: which one. torch, transformers, accelerate and numpy suffice to measure.
# Tests and whole runs need more: `wheels DIR [bitsandbytes ...]` downloads it for Python 3.12 where there is a network,
# `--wheels DIR` installs it where not: datasets evaluate dill multiprocess liger-kernel pandas pyarrow (67 of 70 MB)
# requests xxhash python-dateutil urllib3 certifi charset-normalizer pytest iniconfig pluggy. Delete what is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
exec "${PYTHON:-python3}" scripts/benchmarks/gpu_session.py "$@"
