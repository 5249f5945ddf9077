#!/usr/bin/env bash
# Train on the nodes of a Slurm job. See docs/running-on-slurm.md for details.
#
#   bash launchers/slurm_multi.sh [SBATCH OPTIONS --] [RECIPE] [--resume] [section.key=value ...] # checks, then submits
#   sbatch [SBATCH OPTIONS] launchers/slurm_multi.sh [RECIPE] ...                                 # checks in the job
#
#   RECIPE              a YAML; without one, recipes/quickstart.yaml with a global batch that the job's ranks can share
#   --dry-run           check everything and print what would be started
#   --doctor            run doctor.py instead of train.py, on the same nodes
#   PROCESSES=N         processes per node: fewer than its GPUs, or on nodes without GPUs
#   CONTAINER_IMAGE=I   run in this image (needs pyxis in Slurm); CONTAINER_MOUNTS=A:B,... mounts more folders
#   MAX_REQUEUES=N      how often this job may requeue itself (default 100)
#
# Before the time limit the run writes a checkpoint, and the job requeues itself; its next part continues from there.
# Exit codes: 0 done, 2 a mistake, 75 stopped early and not requeued; others are train.py's.
#SBATCH --job-name=eagle3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0: is for bash; start it with bash $0" >&2; exit 2; }
set -euo pipefail

# sbatch runs a copy of this file from a folder of its own; Slurm knows where it came from.
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
if [[ ! -e $root/launchers/environment.sh ]]; then
  command=$(scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null | sed -n 's/^ *Command=//p' | sed -n 1p) || true
  root=${command%/launchers/slurm_multi.sh*}
  if [[ ! -e $root/launchers/environment.sh ]]; then
    echo "error: this job does not know its repository; submit launchers/slurm_multi.sh by its path in there" >&2
    exit 2
  fi
fi
# shellcheck source=launchers/environment.sh
source "$root/launchers/environment.sh"

check() {
  # This needs no GPU, and DeepSpeed would remark that a login node has none.
  "${once[@]}" env DS_ACCELERATOR=cpu \
    python "$root/launchers/train.py" "${arguments[@]}" "${resume[@]}" --check "${nodes}x$processes"
}

# The recipe's output.dir, with overrides applied.
output_dir() {
  local recipe
  recipe=$("${once[@]}" python "$root/launchers/train.py" "${arguments[@]}" --print-recipe) || return
  "${once[@]}" python -c 'import sys, yaml; print(yaml.safe_load(sys.argv[1])["output"]["dir"])' "$recipe"
}

# The command that starts one launcher per node. When a rank dies, the others report why and end by themselves; --wait
# ends what is left a minute after the first node has ended. (--kill-on-bad-exit=1 would cut off the reason, and also
# the nodes that end with 75 a second after the first.) Ranks may use all cores that the job has on their node.
make_step() { # job, head node's address, port
  step=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 --cpu-bind=none
    --open-mode=append --output="slurm-$1-node%n.log" "${container[@]}")
  node=(bash "$root/launchers/slurm_node.sh" "$nodes" "$processes" "$2" "$3"
    "$root/launchers/$program" "${arguments[@]}")
  [[ $program == train.py ]] || return 0
  node+=("${resume[@]}" --stop-code 75)
}

show_step() {
  show "${step[@]}" "${node[@]}"
  echo "# on every node, its number in place of 0 (values as on this machine):"
  bash "${node[1]}" --dry-run "${node[@]:2}"
}

read_command_line "$@"
require_separator
require_requeues
resume=() # the caller's own --resume counts; without one, add it
[[ " ${arguments[*]} " == *" --resume"[\ =]* ]] || resume=(--resume auto)

choose_container
if [[ ! ${SLURM_JOB_ID:-} ]]; then
  nodes=$(requested --nodes -N)
  gpus=$(requested --gpus-per-node '')
  choose_processes "$gpus" "asked for"
  if [[ ${CONTAINER_IMAGE:-} ]]; then
    echo "the recipe will be checked in the job, in its container"
  else
    check || exit
  fi
  submission=(sbatch "${options[@]}" "$root/launchers/slurm_multi.sh" "${arguments[@]}")
  [[ $program == train.py ]] || submission+=(--doctor)
  if [[ $dry_run ]]; then
    make_step JOB HEAD_NODE FREE_PORT
    show "${submission[@]}"
    echo "# in the job, on its first node:"
    show_step
    exit
  fi
  submit "train here with launchers/single_node.sh" "${submission[@]}"
fi

((${#options[@]} == 0)) || refuse "sbatch options in a job that has begun: ${options[*]}; leave them out, with the --"
nodes=$SLURM_JOB_NUM_NODES
choose_processes "${SLURM_GPUS_ON_NODE:-0}" "in this job"

# From here on, SIGUSR1 comes before the time limit, and at a preemption if so configured; SIGTERM comes from scancel.
stopping='' again=''
trap 'stopping=yes again=yes' USR1
trap 'stopping=yes' TERM

check || exit
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# The name or address that Slurm itself uses for the node.
address=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
make_step "$SLURM_JOB_ID" "$address" "$(free_port)"
if [[ $dry_run ]]; then
  show_step
  exit
fi

folder=$(output_dir)/checkpoints
newest_checkpoint() {
  if [[ -d $folder ]]; then find "$folder" -maxdepth 1 -name 'step-*' ! -name '*.partial' | sort | tail -n 1; fi
}

before=$(newest_checkpoint)
logs="$PWD/slurm-$SLURM_JOB_ID-node*.log"
echo "job $SLURM_JOB_ID, part $((${SLURM_RESTART_COUNT:-0} + 1)): $SLURM_JOB_NODELIST, logs in $logs"
"${step[@]}" "${node[@]}" &
await_end "$!" "$!" # srun passes SIGUSR1 to its tasks

# Left by a part that was stopped before its first step. Once may be bad luck; twice in a row means it would go on
# forever.
fruitless=slurm-$SLURM_JOB_ID-no-step
after=$(newest_checkpoint)
[[ $after == "$before" ]] || rm -f "$fruitless"

if ((code == 0)); then
  echo "done"
elif ((code == 75)) && [[ $after == "$before" && -e $fruitless ]]; then
  echo "error: stopped twice before the first step of a part, so not queued again; ask for more --time" >&2
elif ((code == 75)); then
  [[ $after != "$before" ]] || touch "$fruitless"
  echo "stopped before its end; newest checkpoint: ${after:-none}"
  if [[ $again ]]; then requeue; fi
elif [[ $stopping ]]; then
  echo "ended by a signal, with exit code $code: the newest checkpoint counts"
elif ((nodes > 1)) && [[ $program == train.py ]] &&
  ! timeout 60 srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 true; then
  echo "exit code $code, and a node of $SLURM_JOB_NODELIST does not answer"
  requeue
else
  echo "error: exit code $code; the reason is in $logs" >&2
fi
exit "$code"
