#!/usr/bin/env bash
# A training of any length under Slurm: it runs until the time limit is near, saves, and goes on in the next slot.
#
#     sbatch examples/slurm.sh --model gpt2-1.5b --data /shared/text --steps 100000 --out /shared/run
#
# 1  Slurm wakes this script five minutes before the limit (--signal).
# 2  It tells the ranks to stop (SIGTERM): they finish their step and save, all at the same step.
# 3  The job goes back into the queue, and --resume-or-start goes on from there, also on another number of nodes.
#
# All nodes see --out. A rank that is lost in between is started again from the last checkpoint (--max-restarts).
#SBATCH --job-name=onefold
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280 # seconds that torchrun waits for the save
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a new store for each start: the old one has the addresses of dead ranks

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m onefold.cli.main train --resume-or-start --shutdown-s 270 "$@" &
step=$!

out_of_time=""
stop() {
    out_of_time=yes
    scancel --signal=TERM "$SLURM_JOB_ID" # to what srun started, not to this script
}
trap stop USR1

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends a wait; the ranks may still be saving
    code=0
    wait "$step" || code=$?
done

if [ -n "$out_of_time" ]; then
    echo "out of time: saved, and back into the queue"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
