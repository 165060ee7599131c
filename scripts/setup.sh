#!/usr/bin/env bash
# Makes .venv and installs the template into it, with the versions of constraints.txt. Arguments: extras, such as dev.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
extras=$(IFS=,; echo "$*")
target=".${extras:+[$extras]}"
wanted=$(cat pyproject.toml constraints.txt | cksum)
bin=.venv/bin && [ "${OS:-}" = Windows_NT ] && bin=.venv/Scripts
stamp=.venv/installed${extras:+-${extras//,/-}}
if [ -x $bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
if [ ! -x $bin/python ] && ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    found=$("$python" --version 2>&1 || true)
    echo "Python 3.10 or newer is needed, found: ${found:-none}. Set PYTHON=/path/to/a/newer/python3." >&2 && exit 2
fi
[ -x $bin/python ] || "$python" -m venv .venv
echo "Installing $target (the first time takes a few minutes) ..."
# torch on its own and first: another package's open range must not bring a newer build.
$bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)" -c constraints.txt
$bin/python -m pip install --quiet --disable-pip-version-check -e "$target" -c constraints.txt
echo "$wanted" >"$stamp"
