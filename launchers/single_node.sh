#!/usr/bin/env bash
# Train on one machine, one process per GPU:
#   bash launchers/single_node.sh [RECIPE] [--resume auto] [section.key=value ...]
#
#   RECIPE        a YAML; without one, recipes/quickstart.yaml
#   PROCESSES=N   start N processes: fewer than there are GPUs, or on a machine without GPUs (default there: 1)
#   --dry-run     check everything and print what would be started
#   --doctor      run doctor.py instead of train.py
#   --quiet       print only results and warnings: an option of train.py and of the DeepSpeed launcher
#
# Everything else goes to train.py. On SIGUSR1, SIGTERM or SIGINT (Ctrl-C) the run finishes its step, writes a
# checkpoint and ends; a second signal, except SIGUSR1, ends it at once. The exit code is train.py's; 130: ended by
# Ctrl-C; 2: a mistake in the recipe or the command line, and nothing was started.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0: is for bash; start it with bash $0" >&2; exit 2; }
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
# shellcheck source=launchers/environment.sh
source "$root/launchers/environment.sh"

read_command_line "$@"
((${#options[@]} == 0)) || refuse "-- is for slurm_multi.sh; leave it out"
require deepspeed

gpus=1 most='' # on a machine without GPUs, one process with all cores, or as many as PROCESSES says
if [[ ${CUDA_VISIBLE_DEVICES:-} ]]; then
  [[ $CUDA_VISIBLE_DEVICES =~ ^[0-9]+(,[0-9]+)*$ ]] ||
    refuse "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES: DeepSpeed takes numbers only; name the GPUs as in 0,1"
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  gpus=${#visible[@]} most=$gpus
elif command -v nvidia-smi >/dev/null && [[ ! -v CUDA_VISIBLE_DEVICES ]]; then
  gpus=$(nvidia-smi -L | grep -c '^GPU' || true) most=${gpus#0}
fi
choose_processes "$gpus"
[[ ! $most ]] || ((processes <= most)) ||
  refuse "PROCESSES=$PROCESSES: is more than the GPUs here, $most; give $most or fewer"
set_environment "$processes"
# As on a CPU; otherwise DeepSpeed adds remarks about this machine to the output of the check.
DS_ACCELERATOR=cpu python "$root/launchers/train.py" "${arguments[@]}" --check "1x$processes" || exit

devices=(--num_gpus "$processes")
if [[ ${CUDA_VISIBLE_DEVICES:-} ]]; then # the launcher only reads it if it is given no number
  visible=("${visible[@]:0:processes}")
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${visible[*]}")
  devices=()
fi
# No hostfile: one at DeepSpeed's default place, /job/hostfile, would turn this into a job on other machines.
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
stop() { # $1: the signal
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
# SIGHUP too: closing a terminal should not leave the ranks behind.
trap 'end SIGTERM' TERM
trap 'end SIGHUP' HUP
trap 'interrupted=yes; end Ctrl-C' INT
# On one line: bash reads this file as it runs, and the file may have been edited by the time the run ends.
run_ranks "${command[@]}" && exit "$([[ $interrupted ]] && echo 130 || echo "$code")"
