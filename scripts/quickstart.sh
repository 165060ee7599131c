#!/usr/bin/env bash
# Installs the template if need be and trains a small model on real text. Extra arguments go to train/main.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
bin=.venv/bin && [ "${OS:-}" = Windows_NT ] && bin=.venv/Scripts
launch=cpu threads=${OMP_NUM_THREADS:-$($bin/python -c 'import os; print(os.cpu_count() or 1)')}
if $bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then launch=single_gpu threads=1; fi
exec $bin/accelerate launch --quiet --config_file "accelerate_configs/$launch.yaml" \
    --num_cpu_threads_per_process "$threads" train/main.py --config recipes/quickstart.yaml "$@"
