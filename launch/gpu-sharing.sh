#!/usr/bin/env bash
# One machine whose GPUs are shared by several clients each: rank 0 coordinates on the CPU, and the clients take the GPUs
# in turn (docs/gpu.md). CUDA MPS, where it is there, lets their kernels run side by side instead of in turn.
#
#   RANKS_PER_GPU=4 launch/gpu-sharing.sh configs/mnist-cnn-fed-raa.yaml [raafl options]
#
# The number of clients is RANKS_PER_GPU x GPUs. Each is told that its share of a GPU's memory is all it has (MEMORY_SHARE, 0.9
# of the GPU over RANKS_PER_GPU, in bytes): raafl chooses submodels that fit, and MPS refuses to give a process more.
set -euo pipefail

config=${1:?usage: $0 CONFIG [raafl options]}
shift
per_gpu=${RANKS_PER_GPU:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

mapfile -t totals < <(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits)
num_gpus=${#totals[@]}
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    num_gpus=${#visible[@]}
fi
[ "$num_gpus" -gt 0 ] || { echo "$0: nvidia-smi finds no GPU" >&2; exit 2; }
least=$(printf '%s\n' "${totals[@]}" | sort -n | head -n 1) # MiB
share=${MEMORY_SHARE:-$((least * 1048576 * 9 / 10 / per_gpu))}
clients=$((per_gpu * num_gpus))

own_mps=
if command -v nvidia-cuda-mps-control >/dev/null && [ "${MPS:-1}" = 1 ] && [ "$per_gpu" -gt 1 ]; then
    if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then # no daemon of the user's own: one for this run
        own_mps=$(mktemp -d -t raafl-mps-XXXXXX)
        export CUDA_MPS_PIPE_DIRECTORY=$own_mps CUDA_MPS_LOG_DIRECTORY=$own_mps
        nvidia-cuda-mps-control -d
    fi
    # An even share of the multiprocessors to begin with would idle those of a client that waits: they are left to all.
    limit=
    for ((gpu = 0; gpu < num_gpus; gpu++)); do limit+="${limit:+,}$gpu=$((share / 1048576))M"; done
    export CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=$limit
else
    echo "$0: without MPS; the clients of a GPU take turns" >&2
fi
end() {
    [ -z "$own_mps" ] || { echo quit | nvidia-cuda-mps-control >/dev/null; rm -rf "$own_mps"; }
}
trap end EXIT

torchrun --standalone --nproc-per-node "$((clients + 1))" -m raafl fit --config "$config" --clients "$clients" \
    --fabric.accelerator cuda --memory "$share" "$@"
