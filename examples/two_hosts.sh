#!/usr/bin/env bash
# Run the demo as two hosts of one rank each on this machine: every rank has a host identity of its
# own, so that shards travel over libfabric (here TCP on the loopback device), not shared memory.
#
#     examples/two_hosts.sh [arguments of examples/train.py]
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -d .venv/bin ]] && PATH="$PWD/.venv/bin:$PATH"

export DS_ACCELERATOR=cpu MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
export SMDDP_FABRIC_INTERFACE=lo
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# The launcher gives all ranks the same environment; a shell sets the host identity of each rank.
exec deepspeed --num_gpus 2 --no_python --no_local_rank \
  bash -c 'SMDDP_HOST_ID=host$LOCAL_RANK exec python -u examples/train.py "$@"' train \
  --deepspeed_config ds_configs/quickstart.json --output runs/two-hosts "$@"
