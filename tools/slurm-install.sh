#!/usr/bin/env bash
# usage: tools/slurm-install.sh     Slurm's binaries for tools/slurm-cluster: installed where that is possible, else named
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
# The last three are for accounting, which limits of a QOS need: slurmdbd keeps it in MariaDB, of which the bare server will do.
packages=(slurmctld slurmd slurm-client munge iproute2 slurmdbd mariadb-server-core mariadb-client-core)
missing=()
for binary in slurmctld slurmd sbatch ip slurmdbd mariadbd mariadb; do
    command -v "$binary" >/dev/null || missing+=("$binary")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "the tests start a Slurm cluster of their own, and this is missing: ${missing[*]}" >&2
    echo "on Debian and Ubuntu: sudo apt-get install --no-install-recommends ${packages[*]}" >&2
    exit 1
fi
echo "== Slurm (24 MB): ${packages[*]}"
# In runlevel 1 the packages' scripts start no service; tools/slurm-cluster starts its own daemons.
install=(env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    apt-get install --quiet=2 --yes --no-install-recommends -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "${packages[@]}")
"${install[@]}" >/dev/null 2>&1 || { apt-get update --quiet=2 && "${install[@]}" >/dev/null; }
