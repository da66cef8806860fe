#!/usr/bin/env bash
# usage: tools/setup.sh [--python PATH] [--venv FOLDER] [EXTRA,EXTRA…]
# Make .venv (or FOLDER) in this checkout and install relax_hpc with these extras into it (default: analysis).
# --python: by this interpreter (or PYTHON=PATH; default: the one that made the environment, else python3). An environment
# that another one made is made anew. pip's own settings are heeded: an index with CPU builds of torch, a mirror, wheels.
set -euo pipefail
python=${PYTHON:-} venv=.venv
while [[ "${1:-}" = --* ]]; do
    case $1 in
        --python) python=${2:?--python PATH} ;;
        --venv) venv=${2:?--venv FOLDER} ;;
        *) sed -n 2,5p "$0" >&2; exit 2 ;;
    esac
    shift 2
done
[[ "$python" != */* || "$python" = /* ]] || python=$PWD/$python
extras=${1:-analysis}
cd "$(dirname "$0")/.."
lock=requirements/cpu.lock
# A machine's own settings of Python (PYTHONPATH, PYTHONHOME …) belong to its other programs.
for name in $(compgen -e PYTHON); do unset "$name"; done

# Which Python this is, with or without an environment around it; nothing where it does not run.
about() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null || true; }
made=$("$venv/bin/python" -c 'import pip' 2>/dev/null && about "$venv/bin/python" || true)
if [ -z "$made" ] || { [ -n "$python" ] && [ "$made" != "$(about "$python")" ]; }; then
    python=${python:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        version=$("$python" --version 2>&1 || true)
        echo "relax_hpc needs Python 3.11 or newer; '$python' is ${version##*: }: give --python /path/to/python3.11" >&2
        exit 1
    }
    [ ! -e "$venv" ] || echo "== relax_hpc: '$venv' is of another Python (${made:-one that does not run}): it is made anew"
    "$python" -m venv --clear "$venv"
fi
# Installed already, with the same lock and extras: nothing to do.
stamp="$venv/.relax-$extras-$(cat "$lock" setup.cfg tools/setup.sh tools/torchvision_cpu.py | sha256sum | cut -c1-16)"
[ -e "$stamp" ] && exit 0

echo "== relax_hpc: environment in '$venv' by $("$venv/bin/python" --version)" \
    "(1.5 GB and two minutes with a CPU build of torch, 6 GB with a CUDA build; 2 GB more with sglang-cpu)"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location)
# torch first and by its exact version: a plain `torch` may bring gigabytes of CUDA packages.
"${pip[@]}" "$(grep '^torch==' "$lock")"
"${pip[@]}" --use-pep517 --constraint "$lock" --editable ".[$extras]"
if [[ ",$extras," = *,sglang-cpu,* ]]; then
    # Without their dependencies, which are a CUDA build of torch and gigabytes of kernels for it.
    "${pip[@]}" --no-deps $(grep -E '^(sglang|torchvision)==' "$lock")
fi
if [[ ",$extras," = *,sglang-cpu,* || ",$extras," = *,media,* ]]; then
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null || {
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        cp tools/torchvision_cpu.py "$site/"
        echo "import torchvision_cpu" >"$site/torchvision_cpu.pth"
        "$venv/bin/python" -c 'import torchvision'
    }
fi
touch "$stamp"
