#!/bin/bash
# A Ray cluster on the nodes of a Slurm job, and a run on it:  sbatch --nodes 8 slurm.sh config.yaml runtime=hybrid workers=64
# With RUN=FOLDER in its environment it goes on with that run; so does a job that Slurm has put back into the queue.
#SBATCH --job-name=braid
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=INT@300
#SBATCH --output=braid-%j.log
set -euo pipefail

ENVIRONMENT=${ENVIRONMENT:-$HOME/braid/.venv}     # the same on all nodes
SHARED=${SHARED:-$SLURM_SUBMIT_DIR}               # models, data and runs; seen by all nodes
PORT=${PORT:-6379}

source "$ENVIRONMENT/bin/activate"
cd "$SHARED"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$PORT
export RAY_ADDRESS=$address RAY_USAGE_STATS_ENABLED=0

# Ray's processes end with the job.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap ray start --head --port "$PORT" --block &
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap ray start --address "$address" --block &
done
# A node that comes late is waited for, and one that does not come is told.
for _ in $(seq 60); do
    joined=$(python -c 'import ray; ray.init("auto", logging_level="ERROR"); print(sum(n["Alive"] for n in ray.nodes()))' 2>/dev/null || echo 0)
    [ "$joined" -eq "${#nodes[@]}" ] && break
    sleep 5
done
[ "$joined" -eq "${#nodes[@]}" ] || { echo "only $joined of ${#nodes[@]} nodes joined Ray at $address" >&2; exit 1; }

braid doctor --cluster "$@"
# The name of the run is the job's, so that a job which Slurm has started again finds it.
RUN=${RUN:-}
if [ -z "$RUN" ] && [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    RUN=$(find "$SHARED" -maxdepth 3 -type d -name "slurm-$SLURM_JOB_ID" -print -quit)
fi
if [ -n "$RUN" ]; then
    exec braid train --resume "$RUN"
fi
exec braid train "$@" "name=slurm-$SLURM_JOB_ID"
