# Shared by the shell launchers: how mistakes are reported, the ranks' environment, how signals reach the ranks. To be
# sourced, not run; bash 4.4 or newer. Functions leave their results in the variables that their comments name.
# shellcheck shell=bash disable=SC2034,SC2154

# Report a user's mistake as the Python launchers do: one line and exit code 2.
refuse() {
  echo "error: $*" >&2
  exit 2
}

# Fill the arrays `options` and `arguments` from "[OPTIONS --] [RECIPE] [ARGUMENTS]". Anywhere among them, --dry-run
# sets `dry_run`, --doctor sets `program` to doctor.py instead of train.py, --quiet is also passed to DeepSpeed's
# launcher (`quiet`), and --help prints the comment at the top of the script.
read_command_line() {
  options=() arguments=() dry_run='' program=train.py quiet=()
  local word
  for word in "$@"; do
    if [[ $word == --help || $word == -h ]]; then
      sed -n '2,${/^#SBATCH/q;/^#/!q;s/^# \{0,1\}//;p}' "$0"
      exit
    elif [[ $word == --dry-run ]]; then
      dry_run=yes
    elif [[ $word == --quiet ]]; then
      quiet=(--quiet)
    elif [[ $word == --doctor ]]; then
      program=doctor.py
    elif [[ $word == -- && ${#options[@]} == 0 ]]; then
      options=("${arguments[@]}") arguments=()
    else
      arguments+=("$word")
    fi
  done
  arguments+=("${quiet[@]}")
}

# Print a command line in a form that can be typed.
show() {
  local line
  printf -v line '%q ' "$@"
  echo "${line% }"
}

require() {
  command -v "$1" >/dev/null || refuse "$1 is not on PATH; activate the environment that README.md installs"
}

# Set `processes` to PROCESSES if the caller has set it, else to the given number of GPUs, else refuse.
choose_processes() {
  processes=${PROCESSES:-$1}
  [[ $processes =~ ^[0-9]+$ ]] || refuse "PROCESSES=$processes: not a number of processes per node; give 1 or more"
  [[ ! ${PROCESSES:-} ]] || ((processes > 0)) || refuse "PROCESSES=$PROCESSES: give 1 or more"
  ((processes > 0)) || refuse "no GPU ${2:-here}; set PROCESSES, the processes per node, as in PROCESSES=2 bash ..."
}

# Set the ranks' environment, except variables that the caller has set. $1: processes on this node.
set_environment() {
  # Run the checkout whose launcher was called, whichever one is installed.
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  # Streams differ in length from step to step. Growing segments, instead of ever new blocks, keep that from fragmenting
  # the GPU's memory (PyTorch's notes on CUDA semantics; PYTORCH_CUDA_ALLOC_CONF is the older name).
  [[ -v PYTORCH_CUDA_ALLOC_CONF ]] || default PYTORCH_ALLOC_CONF expandable_segments:True
  # Otherwise every rank would start as many threads as the node has cores.
  default OMP_NUM_THREADS "$((($(nproc) + $1 - 1) / $1))"
}

default() { [[ -v $1 ]] || export "$1=$2"; }

show_environment() {
  local name
  for name in PYTHONPATH PYTORCH{,_CUDA}_ALLOC_CONF OMP_NUM_THREADS CUDA_VISIBLE_DEVICES; do
    if [[ -v $name ]]; then show "export" "$name=${!name}"; fi
  done
}

# Print a port that nothing on this machine listens on, since two jobs may share it; below the range of outgoing
# connections.
free_port() {
  local port
  while
    port=$((20000 + RANDOM % 10000))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null
  do :; done
  echo "$port"
}

# Wait for a process to end; sets `code`, and `ranks` to what its children have started. A trap may set `stopping=yes`
# meanwhile: SIGUSR1 then goes to $2, so that the ranks write a checkpoint and end. $1: a process that this shell
# started. $2: a process, or -group.
await_end() {
  ranks=()
  while kill -0 "$1" 2>/dev/null; do
    # Repeatedly, since a rank that has just started does not listen yet.
    if [[ $stopping ]]; then kill -USR1 -- "$2" 2>/dev/null || true; fi
    mapfile -t ranks < <(pgrep -P "$1" | xargs -r -n 1 pgrep -P 2>/dev/null)
    sleep 5 >&/dev/null & # bounds the wait, which a trap that runs just before it does not end
    wait -n "$1" "$!" 2>/dev/null || true # silenced: bash remarks on a process that was killed
  done
  code=0
  wait "$1" 2>/dev/null || code=$?
}

# Whether one of these processes lives.
alive() {
  local process
  for process in "$@"; do
    if kill -0 "$process" 2>/dev/null; then return 0; fi
  done
  return 1
}

# Start a DeepSpeed launcher and wait until all its processes have ended; sets `code`. `stopping` is as above.
run_ranks() {
  # DeepSpeed's launchers do not pass SIGUSR1 on: they die of it and leave the ranks running. So they are started with
  # it ignored; train.py handles it again. Their own process group limits the signal to these processes.
  (trap '' USR1 && exec setsid "$@") &
  group=$!
  await_end "$group" "-$group"
  # Whatever is left now has lost its launcher. If one launcher is killed by a signal, the other reports 0.
  local orphaned=''
  while alive "${ranks[@]}"; do # they notice, write a checkpoint and end
    orphaned=yes
    sleep 1
  done
  if kill -0 -- "-$group" 2>/dev/null; then
    if [[ $stopping ]]; then # it died of the signal that its ranks are still handling
      while kill -0 -- "-$group" 2>/dev/null; do sleep 1; done
    else
      sleep 5 # for helpers that end by themselves once their rank is gone
      kill -KILL -- "-$group" 2>/dev/null || true
    fi
  fi
  if [[ $orphaned && ! $stopping ]] && ((code == 0)); then
    echo "error: DeepSpeed's launcher has died and left its ranks, which have ended; look for a lack of memory" >&2
    code=1
  fi
  return 0
}

# The rest is for the scripts that are submitted with sbatch.

# Refuse options of sbatch that are not followed by --; train.py has none of these.
require_separator() {
  local word
  for word in "${arguments[@]}"; do
    if [[ $word == --part* ]]; then
      refuse "$word: is not an option here: each task of sbatch's --array is a part;" \
        "write --array=1-4 -- RECIPE for four"
    fi
    if [[ $word == -* && ! $word =~ ^--(recipe|resume|deepspeed|stop-code|quiet)(=|$) ]]; then
      refuse "$word: is not an option here; those of sbatch come first, followed by --: ${word%% *} -- RECIPE"
    fi
  done
}

# Print the value of an sbatch option, from the options before `--` or else from the script's #SBATCH lines. $1, $2: its
# long and short form; the second may be empty.
option_value() {
  local value i
  value=$(sed -n "s/^#SBATCH $1=//p" "$0")
  for ((i = 0; i < ${#options[@]}; i++)); do
    case ${options[i]} in
      "$1"=*) value=${options[i]#*=} ;;
      "$1" | "${2:-$1}") value=${options[i + 1]:-} ;;
      "${2:-none}"[0-9]*) value=${options[i]#"$2"} ;;
    esac
  done
  echo "$value"
}

# The same for an option that is a number.
requested() {
  local value
  value=$(option_value "$@")
  value=${value##*:} # of h100:8
  [[ $value =~ ^[0-9]+$ ]] || refuse "sbatch $1=$value: processes are divided by one number; give that"
  [[ $1 != --nodes || $value -gt 0 ]] || refuse "sbatch $1=$value: a job has 1 node or more; give that"
  echo "$value"
}

# Set `container`, what srun needs to run the ranks in an image, and `once`, the prefix of a single command on the first
# node. Inside the container the repository and this folder have the same paths.
choose_container() {
  container=() once=()
  [[ ! ${CONTAINER_MOUNTS:-} || ${CONTAINER_IMAGE:-} ]] ||
    refuse "CONTAINER_MOUNTS=$CONTAINER_MOUNTS: is for a job in a container; set CONTAINER_IMAGE too, or leave it out"
  if [[ ${CONTAINER_IMAGE:-} ]]; then
    local mounts=$root:$root,$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    container=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
    once=(srun --nodes=1 --ntasks=1 "${container[@]}")
  else
    require python
  fi
}

require_requeues() {
  [[ ${MAX_REQUEUES:-100} =~ ^[0-9]+$ ]] ||
    refuse "MAX_REQUEUES=$MAX_REQUEUES: is not a number; give how often the job may go back into the queue"
}

# Run a submission in place of this script. $1: what to do without Slurm. The rest: the command.
submit() {
  command -v sbatch >/dev/null || refuse "sbatch is not on PATH: this machine does not submit to Slurm; $1"
  exec "${@:2}"
}

# Requeue this job under the same number, with the same logs. Slurm ends the script for this, so nothing after it runs.
requeue() {
  if [[ $(basename "$0") != slurm_script ]]; then
    echo "not a batch job: continue with the same command"
  elif ((${SLURM_RESTART_COUNT:-0} >= ${MAX_REQUEUES:-100})); then
    echo "queued again ${SLURM_RESTART_COUNT:-0} times, as MAX_REQUEUES allows: continue with the same command"
  else
    echo "back into the queue; the next part continues"
    # The last task of an array has the array's own number, which would stand for all of its tasks.
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
  fi
}
