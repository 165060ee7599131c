#!/usr/bin/env bash
# Installs the template if need be and trains a small model on real text. Extra arguments go to train/main.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
launch=cpu
if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    launch=single_gpu
fi
exec .venv/bin/accelerate launch --config_file "accelerate_configs/$launch.yaml" \
    train/main.py --config recipes/quickstart.yaml "$@"
