#!/usr/bin/env bash
# One training on two nodes. Run the same command on both; HEAD is the name of either, as both can reach it:
#
#     HEAD=node-a examples/torchrun_two_nodes.sh --model gpt2 --data /shared/text --out /shared/run
#
# All nodes see --out. To try it on one machine without a GPU, run this in two terminals:
#
#     HEAD=localhost PER_NODE=1 examples/torchrun_two_nodes.sh --steps 50 --out run
#
# PORT of HEAD is open to whoever can reach it, and who writes there can run code as you: let only your nodes reach it
# (docs/security.md).
#
# If a rank or a node is lost, all ranks start again from the last checkpoint, up to RESTARTS times (0).
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a new store for each start: the old one has the addresses of dead ranks

exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${PER_NODE:-gpu}" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?the name of one of the nodes}:${PORT:-29500}" --rdzv-id "${ID:-onefold}" \
    -m onefold.cli.main train "$@"
