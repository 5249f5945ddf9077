#!/usr/bin/env bash
# A real Slurm on this machine that looks like a cluster of two nodes (n1, n2), for tests/slurm/run.py.
#   lab.sh start FOLDER     installs Slurm and MUNGE when missing (apt), starts munged, slurmctld and two slurmd
#   lab.sh node FOLDER n2   starts the slurmd of one node (again)
#   lab.sh stop FOLDER      ends exactly what it started, jobs included
# All state, sockets and logs lie in FOLDER; no file of an installed Slurm is touched. Clients find it by
# SLURM_CONF=FOLDER/slurm.conf. Needs root. A node offers 2 CPUs and no GPU.
set -euo pipefail

fail() {
  echo "lab.sh: $*" >&2
  exit 1
}

# Ports that nothing listens on now: another lab, or a real Slurm, may run on this machine.
free_ports() {
  python3 - "$1" <<'PYTHON'
import socket, sys
probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*[probe.getsockname()[1] for probe in probes])
PYTHON
}

install() {
  command -v slurmctld >/dev/null && command -v munged >/dev/null && return
  apt-get update -qq || true # without a network the packages may be in apt's cache
  # The package's own services would start with no configuration; the lab starts its daemons itself.
  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
}

configure() {
  local host controller first second
  host=$(hostname -s)
  read -r controller first second < <(free_ports 3)
  mkdir -p "$lab"/{state,log,spool-n1,spool-n2}
  # proctrack/linuxproc, for cgroups want a machine of one's own. cred_expire: how long a requeued job waits at least.
  cat >"$lab/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$lab/munge.socket,cred_expire=20
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool-%n
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/slurmd-%n.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5
ReturnToService=2
KillWait=30
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=2 RealMemory=4000
PartitionName=lab Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
  ((EUID == 0)) || fail "start as root: slurmd runs jobs as their owners"
  [[ ! -e $lab/slurm.conf ]] || fail "$lab holds a lab already; stop it, or name another folder"
  install
  trap 'tail -n 20 "$lab"/log/* >&2; stop' EXIT
  configure
  export SLURM_CONF=$lab/slurm.conf
  (umask 077 && head -c 1024 /dev/urandom >"$lab/munge.key")
  munged --force --socket "$lab/munge.socket" --key-file "$lab/munge.key" --pid-file "$lab/munged.pid" \
    --log-file "$lab/log/munged.log" --seed-file "$lab/munge.seed"
  slurmctld -f "$SLURM_CONF"
  node n1
  node n2
  for ((second = 0; second < 60; second++)); do
    [[ $(sinfo -h -o %T 2>/dev/null) == idle ]] && trap - EXIT && exit
    sleep 1
  done
  fail "the nodes did not become idle"
}

node() { slurmd -f "$lab/slurm.conf" -N "$1"; }

stop() {
  export SLURM_CONF=$lab/slurm.conf
  local pid
  if [[ -e $lab/slurmctld.pid ]]; then
    timeout 20 scancel --signal=KILL --full --user=root || true
    timeout 20 scancel --user=root || true
    for ((second = 0; second < 40; second++)); do
      [[ -z $(timeout 5 squeue -h 2>/dev/null) ]] && break
      sleep 1
    done
  fi
  for pid in "$lab"/{slurmctld,slurmd-n1,slurmd-n2,munged}.pid; do
    if [[ -s $pid ]]; then kill "$(<"$pid")" 2>/dev/null || true; fi
  done
  for ((second = 0; second < 10; second++)); do # they remove their files when they are done
    compgen -G "$lab/slurm*.pid" >/dev/null || break
    sleep 1
  done
  rm -rf "$lab"/{state,spool-n1,spool-n2,slurm.conf,munge.key,munge.seed,munge.socket*,*.pid}
}

lab=$(realpath -m "${2:-}")
case ${1:-} in
  start) start ;;
  node) node "${3:?node: name n1 or n2}" ;;
  stop) stop ;;
  *)
    sed -n 2,7p "$0"
    exit 2
    ;;
esac
