#!/usr/bin/env bash
# usage: tools/test.sh [--setup-only] [pytest arguments]     set up, then run all tests (or those that the arguments name)
set -euo pipefail
cd "$(dirname "$0")/.."
tools/slurm-install.sh
tools/setup.sh analysis,dev,megatron,mpi,sglang-cpu,tracking
[ "${1:-}" = --setup-only ] && exit 0
exec .venv/bin/python -m pytest "$@"
