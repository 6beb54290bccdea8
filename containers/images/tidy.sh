#!/bin/bash
# What a build step leaves that differs between two builds of the same: logs, caches, times.
#   begin=$(tidy.sh begin); ...; tidy.sh end "$begin" SECONDS_SINCE_THE_EPOCH
set -euo pipefail

case "$1" in
begin)
    marker=$(mktemp -p /dev/shm tidy-XXXXXX)
    # Older than what the builder itself made for this step, mount points; nothing else is so young: what earlier
    # steps left has the time of the release, and a base is older.
    touch -d '10 minutes ago' "$marker"
    echo "$marker"
    ;;
end)
    for left in /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /var/log/bootstrap.log ~root/.cache \
        /var/cache/ldconfig/aux-cache /var/cache/apt/*.bin /var/cache/debconf/*-old /var/lib/dpkg/*-old \
        /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow-; do
        # What an earlier layer has stays: its removal would be recorded with the time of the build.
        [ ! "$left" -nt "$2" ] || rm -rf "$left"
    done
    # But for what is mounted now: its times are others'.
    mounted=()
    while read -r _ _ _ _ place _; do
        [ "$place" = / ] || mounted+=(-path "$place" -prune -o)
    done </proc/self/mountinfo
    find / -xdev "${mounted[@]}" -newer "$2" -print0 |
        xargs -0 --no-run-if-empty touch --no-dereference --date="@$3"
    rm -f "$2"
    ;;
esac
