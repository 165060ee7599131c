#!/usr/bin/env bash
# Runs the quick tests with the oldest or the newest versions that pyproject.toml admits, in an environment of its own:
# versions.sh oldest|newest [pytest arguments]. On Linux torch brings CUDA's packages along, several GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    oldest | newest) which=$1 && shift ;;
    *) echo "usage: versions.sh oldest|newest [pytest arguments]" >&2 && exit 2 ;;
esac
folder=.venv-$which
[ -d "$folder" ] || "${PYTHON:-python3}" -m venv "$folder"
bin=$folder/bin
[ "${OS:-}" = Windows_NT ] && bin=$folder/Scripts
# "torch>=2.11,<2.16" becomes torch==2.11.*, the last corrections of that version included.
sed -n '/^dependencies/,/^]/s/^ *"\([^>]*\)>=\([0-9.]*\).*/\1==\2.*/p' pyproject.toml >"$folder/oldest.txt"
limits=(--upgrade --upgrade-strategy eager)
[ "$which" = oldest ] && limits=(-c "$folder/oldest.txt")
"$bin/python" -m pip install --quiet --disable-pip-version-check -e ".[dev]" "${limits[@]}"
"$bin/python" -m pip list --disable-pip-version-check | grep -E '^(torch|transformers|accelerate|datasets|numpy) '
PATH="$PWD/$bin:$PATH" exec "$bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
