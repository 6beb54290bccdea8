#!/bin/bash
# Proof, at the end of a build, that what was installed works.
#   check_installed.sh TOOLS_FOLDER VARIANT
set -euo pipefail
built=$(horovodrun --check-build)
needed=('[X] PyTorch' '[X] MPI' '[X] Gloo')
[ "$2" = cpu ] || needed+=('[X] NCCL')
for part in "${needed[@]}"; do
    case "$built" in
    *"$part"*) ;;
    *)
        printf 'Horovod was built without %s:\n%s\n' "$part" "$built" >&2
        exit 1
        ;;
    esac
done
python -c 'import horovod.torch, perception, pipelines, torch'
python -m pipelines show-config lane-small >/dev/null
# Two ranks add up, by MPI and by Gloo. Libraries for GPUs are there, a driver is not: no GPU takes part.
if [ "$2" = cpu ]; then
    python "$1/check_horovod.py"
fi
