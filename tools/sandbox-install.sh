#!/usr/bin/env bash
# usage: tools/sandbox-install.sh     bubblewrap for the tests of sandboxes: installed where that is possible, else named
set -euo pipefail
command -v bwrap >/dev/null && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests of sandboxes in namespaces are skipped; on Debian and Ubuntu: sudo apt-get install --no-install-recommends bubblewrap" >&2
    exit 0
fi
echo "== sandboxes: bubblewrap"
install=(env DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends
    -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 bubblewrap)
"${install[@]}" >/dev/null 2>&1 || { apt-get update --quiet=2 && "${install[@]}" >/dev/null; } ||
    echo "not installed: tests of sandboxes in namespaces are skipped" >&2
