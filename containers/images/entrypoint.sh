#!/bin/bash
# Says on standard error, in a few lines, what would go wrong in training here, then becomes the command.
set -euo pipefail

note() { printf 'roadfuse: %s\n' "$*" >&2; }

# What `python -m containers run --secret` gives: files of a folder that no inspection shows.
secrets=/run/secrets/roadfuse
if [ -d "$secrets" ]; then
    for file in "$secrets"/*; do
        [ -f "$file" ] || continue
        # The x keeps blank lines at the end, which a command substitution drops.
        value=$(cat "$file" && printf x)
        export "${file##*/}=${value%x}"
    done
    unset value
fi

# Any number may run this, with or without an account in the image.
if ! getent passwd "$(id -u)" >/dev/null; then
    export USER="${USER:-user-$(id -u)}" LOGNAME="${LOGNAME:-user-$(id -u)}"
fi
if [ ! -w "${HOME:-/nowhere}" ]; then
    HOME=$(mktemp -d "/tmp/home-$(id -u)-XXXXXX")
    export HOME
fi

# The cards are there: is the driver new enough for this image's CUDA, and may memory be pinned for the network?
check_gpus() {
    driver=$(sed -n 's/.*Kernel Module.* \([0-9][0-9]*\)\.[0-9].*/\1/p' /proc/driver/nvidia/version 2>/dev/null || true)
    case "${CUDA_VERSION:-}" in
    11.*) needed=450 ;;
    12.*) needed=525 ;;
    13.*) needed=580 ;;
    *) needed=0 ;;
    esac
    if [ -n "$driver" ] && [ "$driver" -lt "$needed" ]; then
        note "driver $driver is too old for CUDA ${CUDA_VERSION}: needs $needed or newer on the host"
    fi
    if [ "$(ulimit -l)" != unlimited ]; then
        note "memlock is $(ulimit -l) KiB: InfiniBand needs more; run with --ulimit memlock=-1"
    fi
}

# Once a node: of several ranks that a launcher started, the first one speaks.
if [ "${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-${LOCAL_RANK:-0}}}" = 0 ]; then
    shm_kib=$(df -k --output=size /dev/shm 2>/dev/null | tail -n 1 | tr -d ' ' || true)
    if [ "${shm_kib:-0}" -lt 1048576 ]; then
        note "/dev/shm has $((${shm_kib:-0} / 1024)) MiB: workers that load data may end with a bus error;" \
            "run with --shm-size 8g or --ipc host"
    fi
    if [ "${ROADFUSE_VARIANT:-}" = cpu ]; then
        note "this image is for CPUs: no GPU is used"
    elif [ -e /dev/nvidiactl ]; then
        check_gpus
    else
        note "no GPU in this container: trains on CPUs; run with --gpus all, on a host with NVIDIA's driver and runtime"
    fi
fi

case "${1:-}" in
train)
    shift
    # The image's own model, unless another one is named or a run is gone on with.
    case "${1:-}" in
    "" | -*)
        case " $* " in
        *" --resume "* | *" --help "* | *" -h "*) ;;
        *) [ -z "${ROADFUSE_MODEL:-}" ] || set -- "$ROADFUSE_MODEL" "$@" ;;
        esac
        ;;
    esac
    set -- python -m pipelines train "$@"
    ;;
evaluate | data | predict | export | trace | show-config | bench | tune | doctor)
    set -- python -m pipelines "$@"
    ;;
esac
case "${1:-} ${2:-} ${3:-}" in
"python -m pipelines"*)
    # The image's own code, also where the working folder is a checkout; PYTHONSAFEPATH= (empty) takes that one.
    export PYTHONSAFEPATH="${PYTHONSAFEPATH-1}"
    ;;
esac
exec "$@"
