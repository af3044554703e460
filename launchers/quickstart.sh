#!/usr/bin/env bash
# Trains a small byte-level Llama on Python's own source: on two CPU ranks folded by TSP, or on this machine's GPUs.
# Arguments go to launchers/train.py, behind the defaults: launchers/quickstart.sh --steps 50
set -euo pipefail
# shellcheck source=launchers/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$DS_TSP_ROOT"

gpus=0
[ "${DS_ACCELERATOR:-}" = cpu ] || gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
case $gpus in
    0) ranks=2 config=cpu_tsp2 ;;
    1) ranks=1 config=gpu_tsp1_bf16 ;;
    *) ranks=2 config=gpu_tsp2_bf16 ;;
esac
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
trap 'rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$port"_*' EXIT # DeepSpeed leaves 69 MB per CPU rank

deepspeed --num_gpus "$ranks" --master_port "$port" launchers/train.py \
    --deepspeed --deepspeed_config "ds_configs/$config.json" --steps 200 "$@"
