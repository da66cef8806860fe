#!/usr/bin/env bash
# usage: tools/shared-filesystems-install.sh     GlusterFS and MooseFS for tests/shared_filesystems: installed where that is possible, else named
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
packages=(glusterfs-server glusterfs-client moosefs-master moosefs-chunkserver moosefs-client fuse3 iproute2 util-linux)
missing=()
for binary in glusterd gluster glusterfs mfsmaster mfschunkserver mfsmount fusermount3 ip unshare; do
    command -v "$binary" >/dev/null || missing+=("$binary")
done
[ "$(id -u)" = 0 ] || { echo "tests on real shared file systems need root: they mount, and make a network namespace" >&2 && exit 1; }
[ -e /dev/fuse ] || { echo "tests on real shared file systems need /dev/fuse: this machine has none" >&2 && exit 1; }
[ ${#missing[@]} -eq 0 ] && exit 0

refuse() {
    echo "tests on real shared file systems cannot run, this is missing: ${missing[*]}" >&2
    echo "on Debian and Ubuntu: sudo apt-get install --no-install-recommends ${packages[*]}" >&2
    exit 1
}
command -v apt-get >/dev/null || refuse
echo "== shared file systems: ${packages[*]}"
# In runlevel 1 the packages' scripts start no service; tools/faults/shared.py starts its own daemons.
install=(env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    apt-get install --quiet=2 --yes --no-install-recommends -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "${packages[@]}")
"${install[@]}" >/dev/null 2>&1 || { apt-get update --quiet=2 && "${install[@]}" >/dev/null; } || refuse
