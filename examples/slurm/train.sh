#!/bin/bash
# Trains over the nodes of a Slurm job, and goes on from the newest checkpoint when the job is started again:
#
#   sbatch --nodes=4 examples/slurm/train.sh your.yaml [key=value ...]
#
# Submit it from a folder that all nodes share, with the environment in which `python -m yatt_mm.train` runs active.
# DEVICES_PER_HOST: the devices of a node that the run takes (8). INTERFACE: the network device by which the nodes reach
# each other (that of the first address of `hostname -I`). Variables for engines and ranks, such as NCCL_IB_HCA, are
# keys of the run: ray.env.NCCL_IB_HCA=mlx5
#SBATCH --job-name=yatt-mm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:TERM@300
set -euo pipefail

# A command that prints a node's address.
if [ -n "${INTERFACE:-}" ]; then
  own_address="ip -4 -o address show dev $INTERFACE | awk '{ sub(\"/.*\", \"\", \$4); print \$4; exit }'"
else
  own_address="hostname -I | awk '{ print \$1 }'"
fi

# A token of this job's own, which Ray asks of everyone.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SLURM_SUBMIT_DIR/.ray_token-$SLURM_JOB_ID"
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' > "$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

# Ray on each node, as a step of the job: first on this one, which is the first of them.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(bash -c "$own_address") port=$((20000 + SLURM_JOB_ID % 10000)) steps=()
start_ray() {
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" \
    bash -c "exec ray start --block --node-ip-address=\$($own_address) $2" >> "ray-$SLURM_JOB_ID-$1.log" 2>&1 &
  steps+=($!)
}
start_ray "${nodes[0]}" "--head --port=$port --include-dashboard=false"
for _ in {1..120}; do
  (: < "/dev/tcp/$first/$port") 2> /dev/null && break
  sleep 1
done
for node in "${nodes[@]:1}"; do
  start_ray "$node" "--address=$first:$port"
done

# The run. It waits for the nodes, and gets the SIGTERM that Slurm sends before the job's time is over.
devices=${DEVICES_PER_HOST:-8} status=0
python -m yatt_mm.train "$@" --resume=auto ray.address="$first:$port" \
  placement.num_devices=$((devices * ${#nodes[@]})) placement.devices_per_host="$devices" &
run=$!
trap 'kill -TERM $run' TERM
while :; do
  status=0
  wait $run || status=$?
  kill -0 $run 2> /dev/null || break # else a signal ended the wait, not the run
done
kill "${steps[@]}" 2> /dev/null || true
wait
if [ $status = 75 ]; then # saved and stopped
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
