#!/usr/bin/env bash
# Lint, types, tests. --all runs the slow tests too, and tries more inputs; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh dev
bin=.venv/bin && [ "${OS:-}" = Windows_NT ] && bin=.venv/Scripts
export PATH="$PWD/$bin:$PATH" PYTHONDONTWRITEBYTECODE= # DeepSpeed looks for ninja there; compiled files are kept
if [ "${1:-}" = "--all" ]; then
    set -- -m "not gpu" "${@:2}"
    [ ! -f tests/extras/losses/kernels.sh ] || bash tests/extras/losses/kernels.sh
    export FUZZ_INPUTS=${FUZZ_INPUTS:-1000} FLIPPED_BYTES=${FLIPPED_BYTES:-2000}
fi
$bin/ruff check .
$bin/ruff format --check .
$bin/pyrefly check
$bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
