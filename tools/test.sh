#!/usr/bin/env bash
# usage: tools/test.sh [--python PATH] [--setup-only] [--quick | --shared-filesystems] [pytest arguments]
# Set up, then run all tests (or those that the arguments name).
# --python  under this interpreter, in an environment of its own (.venv-3.13.0); without it, in .venv
# --quick   a part of the tests that is done in 4 minutes on two cores (docs/contributing.md says what it leaves out)
# --shared-filesystems   the runs on real GlusterFS and MooseFS alone, which no other way of calling this includes (root, /dev/fuse)
set -euo pipefail
setup=() venv=.venv only=
while [[ "${1:-}" = --python || "${1:-}" = --setup-only ]]; do
    if [ "$1" = --setup-only ]; then
        only=1
    else
        python=$(command -v "${2:?--python PATH}") || { echo "no Python at '$2'" >&2 && exit 1; }
        python=$(realpath --no-symlinks "$python") && shift
        venv=.venv-$("$python" -c 'import platform; print(platform.python_version())')
        setup=(--python "$python" --venv "$venv")
    fi
    shift
done
cd "$(dirname "$0")/.."
[ "${1:-}" != --shared-filesystems ] || tools/shared-filesystems-install.sh
tools/slurm-install.sh
tools/fuse-install.sh
tools/sandbox-install.sh
tools/setup.sh "${setup[@]}" agents,analysis,dev,docs,media,megatron,mpi,omni,sglang-cpu,tracking
[ -n "$only" ] && exit 0
# tests/conftest.py takes more settings of the machine away; these would decide how pytest itself starts.
for name in $(compgen -e PYTHON); do unset "$name"; done
[ "${1:-}" = --quick ] && shift && set -- -m quick "$@"
[ "${1:-}" = --shared-filesystems ] && shift && set -- --shared-filesystems -n0 tests/shared_filesystems "$@"
exec "$venv/bin/python" -m pytest "$@"
