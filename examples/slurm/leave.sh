#!/bin/bash
# leave.sh JOB NODE [REASON]: takes a node out of a training that runs (train.sbatch) without the loss of a step, and
# has Slurm give it no other job. Runs wherever `scontrol` does, and the nodes are reached.
set -euo pipefail
job=$1 node=$2 reason=${3:-maintenance}
nodes=$(squeue --noheader --jobs="$job" --format=%N)
endpoints=$(scontrol show hostnames "$nodes" | head -n 3 | sed 's/$/:29400/' | paste -sd,)
outlast drain "$node" --rdzv-id="$job" --rdzv-endpoint="$endpoints" --token-file="$HOME/.outlast-token" \
    --reason="$reason"
# Slurm drains a node once the job on it has ended: it does not wait for the launcher that has left.
scontrol update NodeName="$node" State=DRAIN Reason="$reason"
