#!/usr/bin/env bash
# Installs SGLang beside this project for the tests marked `sglang`, on a machine without a GPU. The python on PATH must
# be that of a virtual environment which holds the project, installed with constraints/cpu.txt; those versions stay.
set -euo pipefail
cd "$(dirname "$0")/../.."

python -m pip install --quiet -r tests/sglang_cpu/requirements.txt -c constraints/cpu.txt
# without their dependencies: SGLang's pull in CUDA wheels, and both pin another torch
python -m pip install --quiet --no-deps torchvision==0.28.0 sglang==0.5.23

# the shims, for every process of this environment
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\nimport vision_operators, fewer_collections\n' "$PWD/tests/sglang_cpu/shims" >"$site/sglang-on-cpu.pth"

SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 python -W ignore -c "import sglang.srt.entrypoints.engine"
echo "SGLang is installed. It declares other versions than these, which its CPU path works with:"
python -m pip check | grep "but you have" || true
