#!/usr/bin/env bash
# usage: tools/quickstart.sh [KEY=VALUE…]     set up, then train two-digit addition on this machine (minutes, CPU only)
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh analysis
sets=()
for pair in "$@"; do sets+=(--set "$pair"); done
exec .venv/bin/relax-hpc run recipes/quickstart.toml "${sets[@]}"
