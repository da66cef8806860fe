#!/usr/bin/env bash
# usage: tools/setup.sh [EXTRA,EXTRA…]     make .venv in this checkout and install relax_hpc with these extras into it
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-analysis}
lock=requirements/cpu.lock

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "relax_hpc needs Python 3.11 or newer; $("$python" --version) is at $(command -v "$python"): set PYTHON=/path/to/python3.11" >&2
    exit 1
}
# Installed already, with the same lock and extras: nothing to do.
stamp=".venv/.relax-$extras-$(cat "$lock" setup.cfg tools/setup.sh tools/torchvision_cpu.py | sha256sum | cut -c1-16)"
[ -e "$stamp" ] && exit 0

echo "== relax_hpc: environment in .venv (1.5 GB and two minutes with a CPU build of torch, 6 GB with a CUDA build; 2 GB more with sglang-cpu)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location)
# torch first and by its exact version: a plain `torch` may bring gigabytes of CUDA packages.
"${pip[@]}" "$(grep '^torch==' "$lock")"
"${pip[@]}" --use-pep517 --constraint "$lock" --editable ".[$extras]"
if [[ ",$extras," = *,sglang-cpu,* ]]; then
    # Without their dependencies, which are a CUDA build of torch and gigabytes of kernels for it.
    "${pip[@]}" --no-deps $(grep -E '^(sglang|torchvision)==' "$lock")
    .venv/bin/python -c 'import torchvision' 2>/dev/null || {
        site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        cp tools/torchvision_cpu.py "$site/"
        echo "import torchvision_cpu" >"$site/torchvision_cpu.pth"
        .venv/bin/python -c 'import torchvision'
    }
fi
touch "$stamp"
