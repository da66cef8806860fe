#!/usr/bin/env bash
# usage: tools/fuse-install.sh     what the fault file system of tests/faults needs: installed where that is possible, else named
set -euo pipefail
missing=()
command -v fusermount3 >/dev/null || missing+=(fuse3)
[ -e /usr/include/fuse3/fuse.h ] || missing+=(libfuse3-dev)
command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || missing+=(gcc)
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
[ -e /dev/fuse ] || echo "no /dev/fuse here: tests that mount the fault file system are skipped" >&2
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests that mount the fault file system are skipped; on Debian and Ubuntu: sudo apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 0
fi
echo "== the fault file system: ${missing[*]}"
install=(env DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends
    -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "${missing[@]}")
"${install[@]}" >/dev/null 2>&1 || { apt-get update --quiet=2 && "${install[@]}" >/dev/null; } ||
    echo "not installed: tests that mount the fault file system are skipped" >&2
