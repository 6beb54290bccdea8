#!/bin/bash
# A stand-in for training that uses next to no processor: it holds its nodes for a time and writes a real result.json.
#
#     bash slurm_stand_in.sh RUN_FOLDER SECONDS [CHECKPOINT_EVERY_SECONDS]
#
# With checkpoints it notes how many seconds are done, and goes on from there when it is started again. SIGUSR2 and
# SIGTERM make it write one and end with exit code 75, as training does.
folder=$1 total=$2 every=${3:-$2}
done_seconds=0
[ ! -f "$folder/checkpoint" ] || read -r done_seconds <"$folder/checkpoint"
echo "$done_seconds $SLURM_JOB_ID $SLURMD_NODENAME" >>"$folder/starts.txt"
rm -f "$folder/result.json"
begin=$EPOCHREALTIME sleeping=

write() { # FILE TEXT: whole or not at all
    echo "$2" >"$folder/.$1.$$" && mv "$folder/.$1.$$" "$folder/$1"
}
seconds_since() { # BEGIN, in whole milliseconds and back, since bash has no fractions
    local now=${EPOCHREALTIME/./} then=${1/./}
    local milliseconds=$(((now - then) / 1000))
    printf '%d.%03d' $((milliseconds / 1000)) $((milliseconds % 1000))
}
finish() { # STATUS EXIT_CODE
    write result.json \
        "{\"status\": \"$1\", \"cause\": \"stand-in\", \"metrics\": {}, \"seconds\": $(seconds_since "$begin")}"
    exit "$2"
}
stop() {
    [ -z "$sleeping" ] || kill "$sleeping" 2>/dev/null
    # The part of an interval that was done counts: a checkpoint is written when asked for.
    local part=$(seconds_since "$part_begin")
    write checkpoint $((done_seconds + ${part%.*}))
    finish preempted 75
}
part_begin=$EPOCHREALTIME
trap stop USR2 TERM
while [ "$done_seconds" -lt "$total" ]; do
    part_begin=$EPOCHREALTIME
    part=$((total - done_seconds < every ? total - done_seconds : every))
    sleep "$part" &
    sleeping=$!
    wait "$sleeping"
    sleeping=
    done_seconds=$((done_seconds + part))
    [ "$every" -eq "$total" ] || write checkpoint "$done_seconds"
done
finish finished 0
