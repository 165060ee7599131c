#!/usr/bin/env bash
# Installs Triton and Liger into .venv-kernels, with the versions of constraints.txt: test_interpreted_losses.py runs
# Liger's loss by Triton's interpreter, on a CPU. They have a folder of their own, because a loss that is installed is
# what --loss auto takes, and because Triton takes 700 MB. Cut Cross-Entropy is not among them: the package index has
# only 25.1, which is too old (see pyproject.toml). Does nothing where there is no Triton: outside of Linux.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

[ "$(uname)" = Linux ] || exit 0
packages=$(grep -E '^(triton|liger-kernel)==' constraints.txt)
stamp=.venv-kernels/installed
[ "$(cat "$stamp" 2>/dev/null)" = "$packages" ] && exit 0
rm -rf .venv-kernels
echo "Installing" $packages "into .venv-kernels ..."
# without what they depend on: torch, which is in .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-kernels $packages
echo "$packages" >"$stamp"
