#!/bin/bash
# Debian packages that a build step needs, as NAME or NAME=VERSION; without network where they are there already.
set -euo pipefail

have() {
    local found
    found=$(dpkg-query --show --showformat='${db:Status-Status} ${Version}' "${1%%=*}" 2>/dev/null) || return 1
    [ "${found%% *}" = installed ] && { [ "${1#*=}" = "$1" ] || [ "${found#* }" = "${1#*=}" ]; }
}

missing=()
for package in "$@"; do
    have "$package" || missing+=("$package")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends "${missing[@]}"
rm -rf /var/lib/apt/lists/*
