#!/usr/bin/env bash
# One node's part of a Slurm job; srun starts it once on each node, for slurm_multi.sh and slurm_capture.sh:
#   slurm_node.sh [--dry-run] NODES PROCESSES ADDRESS PORT SCRIPT [ARGUMENTS]
# PROCESSES is the number on each node; all meet at the first node's ADDRESS and PORT. The exit code is the ranks'.
# Ranks are numbered node by node (rank = node * PROCESSES + local), and the layout's order is tensor, Ulysses, ring,
# data, the fastest-changing first: tensor and Ulysses groups stay inside a node, rings cross nodes.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0: is for bash; start it with bash $0" >&2; exit 2; }
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
# shellcheck source=launchers/environment.sh
source "$root/launchers/environment.sh"

(($# >= 5)) || refuse "slurm_node.sh is started by slurm_multi.sh and slurm_capture.sh; start one of these"
dry_run=
if [[ $1 == --dry-run ]]; then
  dry_run=yes
  shift
fi
nodes=$1 processes=$2 address=$3 port=$4
shift 4
require deepspeed
set_environment "$processes"

# The launcher numbers a node's GPUs from 0, whatever Slurm assigned: on a shared node those may belong to another job.
printf -v expected '%s,' $(seq 0 $((processes - 1)))
if [[ ${CUDA_VISIBLE_DEVICES:-} && ! $CUDA_VISIBLE_DEVICES, == "$expected"* ]]; then
  refuse "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES on $(hostname): not its first $processes GPUs; use --exclusive"
fi

# The launcher learns about the nodes from a file. Their names there only have to differ; nothing is reached by them.
hostfile=$(mktemp)
trap 'rm -f "$hostfile"' EXIT
for ((node = 0; node < nodes; node++)); do echo "node$node slots=$processes"; done >"$hostfile"
quiet=()
if [[ " $* " == *" --quiet "* ]]; then quiet=(--quiet); fi # for DeepSpeed's launcher too
command=(deepspeed "${quiet[@]}" --no_ssh --hostfile "$hostfile" --node_rank "${SLURM_NODEID:-0}"
  --master_addr "$address" --master_port "$port" "$@")
if [[ $dry_run ]]; then
  show_environment
  show "${command[@]}"
  exit
fi

stopping=
trap 'stopping=yes' USR1 TERM
# On one line: bash reads this file as it runs, and the file may have been edited by the time the run ends.
run_ranks "${command[@]}" && exit "$code"
