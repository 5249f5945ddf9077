#!/usr/bin/env bash
# Install torch's CUDA build with everything in constraints/cuda.txt, and what stands in for the CUDA runtime and driver
# on a machine without a GPU: bash tests/cuda_build/install.sh FOLDER
#
# Takes Python 3.12, a C compiler, about 6 GB in FOLDER and three minutes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(realpath -m "${1:?usage: bash tests/cuda_build/install.sh FOLDER}")
python=${PYTHON:-python3.12}
if ! "$python" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
  echo "install.sh: $python is not Python 3.12; name one with PYTHON=..." >&2
  exit 2
fi
cd "$here/../.."
[[ -x $folder/venv/bin/python ]] || "$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q -e '.[test]' -c constraints/cuda.txt
# nvidia's own wheel lacks the folder crt/, which comes with Triton
include=$(find "$folder/venv" -path '*nvidia/cu1*/include/cuda_runtime_api.h' -printf '%h\n' | head -n 1)
compiler=$(find "$folder/venv" -path '*triton/backends/nvidia/include/crt/host_defines.h' -printf '%h\n' | head -n 1)
gcc -shared -fPIC -O1 -I"$include" -I"${compiler%/crt}" "$here/cudart.c" -o "$folder/cudart.so"
gcc -shared -fPIC -O1 "$here/driver.c" -o "$folder/libcuda.so.1"
echo "next: bash tests/cuda_build/run.sh $folder -m pytest -q -m cuda_build"
