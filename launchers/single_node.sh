#!/usr/bin/env bash
# Train on one machine, a process a GPU: bash launchers/single_node.sh [RECIPE] [--resume auto] [section.key=value ...]
#
#   RECIPE        a YAML; without one, recipes/quickstart.yaml
#   PROCESSES=N   start N processes: fewer than there are GPUs, or on a machine without (default there: 1)
#   --dry-run     check everything and print what would be started
#   --doctor      run doctor.py in place of train.py
#   --quiet       print only what came out, and warnings: train.py's option, and the DeepSpeed launcher's own
#
# Everything else goes to train.py. SIGUSR1, SIGTERM and SIGINT (Ctrl-C) have the run finish its step, write a checkpoint
# and end; a second one, SIGUSR1 apart, ends it at once. The exit code is train.py's; 130: ended by Ctrl-C; 2: a mistake in
# the recipe or the command line, and nothing was started.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0: is for bash; start it with bash $0" >&2; exit 2; }
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
# shellcheck source=launchers/environment.sh
source "$root/launchers/environment.sh"

read_command_line "$@"
((${#options[@]} == 0)) || refuse "-- is for slurm_multi.sh; leave it out"
require deepspeed

gpus=1 # on a machine without any, one process with all cores
if [[ ${CUDA_VISIBLE_DEVICES:-} ]]; then
  [[ $CUDA_VISIBLE_DEVICES =~ ^[0-9]+(,[0-9]+)*$ ]] ||
    refuse "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES: DeepSpeed takes numbers only; name the GPUs as in 0,1"
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  gpus=${#visible[@]}
elif command -v nvidia-smi >/dev/null && [[ ! -v CUDA_VISIBLE_DEVICES ]]; then
  gpus=$(nvidia-smi -L | grep -c '^GPU' || true)
fi
choose_processes "$gpus"
set_environment "$processes"
# As on a CPU: else DeepSpeed remarks on what this machine has, beside what the check says.
DS_ACCELERATOR=cpu python "$root/launchers/train.py" "${arguments[@]}" --check "1x$processes" || exit

devices=(--num_gpus "$processes")
if [[ ${CUDA_VISIBLE_DEVICES:-} ]]; then # which the launcher reads only where it is told no number
  visible=("${visible[@]:0:processes}")
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${visible[*]}")
  devices=()
fi
# No hostfile: what lies in DeepSpeed's default, /job/hostfile, would make this a job of other machines.
launcher=(deepspeed "${quiet[@]}" --hostfile /dev/null "${devices[@]}" --master_port "$(free_port)")
command=("${launcher[@]}" "$root/launchers/$program" "${arguments[@]}")
if [[ $dry_run ]]; then
  show_environment
  show "${command[@]}"
  exit
fi

if [[ ${CUDA_VISIBLE_DEVICES:-} ]] && ! command -v nvidia-smi >/dev/null; then
  refuse "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES: there is no GPU here (no nvidia-smi); unset it, and set PROCESSES"
fi

stopping='' interrupted='' group=''
stop() { # $1: what came
  [[ $stopping ]] || echo "$1: SIGUSR1 asks the ranks to finish their step, write a checkpoint and end" || true
  stopping=yes
}
end() {
  if [[ $stopping && $group ]]; then
    kill -KILL -- "-$group"
    echo "$1: ended at once; --resume auto continues from the newest checkpoint" || true
  fi
  stop "$1"
}
trap 'stop SIGUSR1' USR1
# SIGHUP, too: a terminal that closes should not leave the ranks behind.
trap 'end SIGTERM' TERM
trap 'end SIGHUP' HUP
trap 'interrupted=yes; end Ctrl-C' INT
# One line: bash reads this file as it goes, and it may have been edited by the time the run ends.
run_ranks "${command[@]}" && exit "$([[ $interrupted ]] && echo 130 || echo "$code")"
