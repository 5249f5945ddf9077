#!/usr/bin/env bash
# Run Python with the CUDA build and its stand-ins: bash tests/cuda_build/run.sh FOLDER SCRIPT|-m MODULE ...
set -euo pipefail
folder=$(realpath "${1:?usage: bash tests/cuda_build/run.sh FOLDER SCRIPT ...}")
shift
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
# this checkout, not the one that install.sh ran in; a PYTHONPATH of yours comes first
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$root
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
LD_PRELOAD=$folder/cudart.so exec "$folder/venv/bin/python" "$@"
