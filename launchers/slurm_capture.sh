#!/usr/bin/env bash
# Capture hidden states with a Slurm job array: each task captures its share of the samples on one node.
#
#   bash launchers/slurm_capture.sh [SBATCH OPTIONS --] RECIPE [section.key=value ...]   # checks, then submits
#   sbatch --array=1-8 [SBATCH OPTIONS] launchers/slurm_capture.sh RECIPE ...
#
# Task I of N runs `capture.py --part (I-1)/N`. A task that ends early, for whatever reason, continues where it stopped;
# at its time limit it requeues itself. --dry-run, PROCESSES, CONTAINER_IMAGE, CONTAINER_MOUNTS and MAX_REQUEUES are as
# in slurm_multi.sh. Exit codes are capture.py's.
#SBATCH --job-name=eagle3-capture
#SBATCH --array=1-4
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0: is for bash; start it with bash $0" >&2; exit 2; }
set -euo pipefail

# sbatch runs a copy of this file from a folder of its own; Slurm knows where it came from.
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
if [[ ! -e $root/launchers/environment.sh ]]; then
  command=$(scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null | sed -n 's/^ *Command=//p' | sed -n 1p) || true
  root=${command%/launchers/slurm_capture.sh*}
  if [[ ! -e $root/launchers/environment.sh ]]; then
    echo "error: this job does not know its repository; submit launchers/slurm_capture.sh by its path in there" >&2
    exit 2
  fi
fi
# shellcheck source=launchers/environment.sh
source "$root/launchers/environment.sh"

check() {
  "${once[@]}" python "$root/launchers/capture.py" "${arguments[@]}" --check --quiet
}

make_step() { # part, address, port
  step=(srun --nodes=1 --ntasks=1 --cpu-bind=none "${container[@]}")
  node=(bash "$root/launchers/slurm_node.sh" 1 "$processes" "$2" "$3"
    "$root/launchers/capture.py" --part "$1" "${arguments[@]}")
}

show_step() {
  show "${step[@]}" "${node[@]}"
  echo "# there (values as on this machine):"
  bash "${node[1]}" --dry-run "${node[@]:2}"
}

read_command_line "$@"
require_separator
require_requeues
[[ $program == train.py ]] || refuse "--doctor is for slurm_multi.sh; leave it out"
choose_container
if [[ ! ${SLURM_JOB_ID:-} ]]; then
  gpus=$(requested --gpus-per-node '')
  tasks=$(option_value --array -a)
  [[ ${tasks%%%*} =~ ^[0-9]+(-[0-9]+(:[0-9]+)?)?$ ]] ||
    refuse "--array=$tasks: parts need tasks without gaps; write it as 1-N, as in --array=1-8"
  choose_processes "$gpus" "asked for"
  if [[ ${CONTAINER_IMAGE:-} ]]; then
    echo "the recipe will be checked in the job, in its container"
  else
    check || exit
  fi
  submission=(sbatch "${options[@]}" "$root/launchers/slurm_capture.sh" "${arguments[@]}")
  if [[ $dry_run ]]; then
    make_step I/N 127.0.0.1 FREE_PORT
    show "${submission[@]}"
    echo "# in each task:"
    show_step
    exit
  fi
  submit "capture here with launchers/capture.py" "${submission[@]}"
fi

((${#options[@]} == 0)) || refuse "sbatch options in a job that has begun: ${options[*]}; leave them out, with the --"
choose_processes "${SLURM_GPUS_ON_NODE:-0}" "in this job"
if [[ ! ${SLURM_ARRAY_TASK_ID:-} ]]; then
  refuse "this job is not an array, so it has no part to capture; submit with --array=1-N"
fi
# shellcheck disable=SC2153
part=$(((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN) / SLURM_ARRAY_TASK_STEP))
last=$(((SLURM_ARRAY_TASK_MAX - SLURM_ARRAY_TASK_MIN) / SLURM_ARRAY_TASK_STEP))
((last + 1 == SLURM_ARRAY_TASK_COUNT)) || refuse "--array has gaps, so tasks cannot be numbered; write it as 1-N"
check || exit
make_step "$part/$SLURM_ARRAY_TASK_COUNT" 127.0.0.1 "$(free_port)"
if [[ $dry_run ]]; then
  show_step
  exit
fi

# SIGUSR1 comes before the time limit. The store keeps every sample that is whole.
trap requeue USR1
trap : TERM # srun gets it too, and this script waits for srun's end
echo "job $SLURM_JOB_ID: part $part of $SLURM_ARRAY_TASK_COUNT on $SLURM_JOB_NODELIST"
"${step[@]}" "${node[@]}" &
stopping=
await_end "$!" "$!"
exit "$code"
