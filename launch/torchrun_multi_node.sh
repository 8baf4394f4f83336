#!/usr/bin/env bash
# Several machines: run this on each of them, with the same MASTER_ADDR and NODES, and its own NODE_RANK. Rank 0, the
# coordinator, is the first rank of NODE_RANK 0. Code, configs and data must lie at the same paths everywhere.
#
#   MASTER_ADDR=10.0.0.1 NODES=3 NODE_RANK=0 launch/torchrun_multi_node.sh configs/quickstart.yaml
#   MASTER_ADDR=10.0.0.1 NODES=3 NODE_RANK=1 launch/torchrun_multi_node.sh configs/quickstart.yaml
#   MASTER_ADDR=10.0.0.1 NODES=3 NODE_RANK=2 launch/torchrun_multi_node.sh configs/quickstart.yaml
set -euo pipefail

config=${1:?usage: $0 CONFIG [raafl options]}
shift
: "${MASTER_ADDR:?the address of the machine with NODE_RANK 0}" "${NODES:?how many machines}" "${NODE_RANK:?0 to NODES-1}"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# On a machine with several networks, name the interface that reaches the others: export GLOO_SOCKET_IFNAME=eth0

exec torchrun \
    --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "${RANKS_PER_NODE:-4}" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    -m raafl fit --config "$config" "$@"
