#!/usr/bin/env bash
# Download the wheels for a GPU machine without network, whose Python 3.12 (Linux, x86-64) has torch 2.11 for CUDA 13,
# Triton 3.6 and transformers 5.17 with what they require:
#
#     bash benchmarks/collect_wheels.sh /tmp/wheels                     everything
#     bash benchmarks/collect_wheels.sh /tmp/wheels training peers      some groups
#     WHEELS=/tmp/wheels bash benchmarks/gpu.sh                         there
#
# The groups, with their megabytes:
#
#     training 9        DeepSpeed and Megatron-core with what they import; pydantic for recipes, httpx2 and xxhash
#     flash-attn-4 10   FlashAttention 4 and the Python part of the language that its kernels are written in
#     cutlass-libs 92   the compiler of that language, without which FlashAttention 4 does not run; one wheel
#     peers 1           SpecForge, for benchmarks/peers; it imports psutil (training); the rest comes with transformers
#
# Versions are those of constraints/, and dependencies are not resolved, so that nothing replaces what the machine has:
# cuda-bindings, for example, comes with torch. No part of gpu.sh needs datasets. DeepSpeed publishes no wheel; pip builds
# one, for which PYTHON (default: python) must have torch. Where transfers are limited, `split` a large wheel and join it
# there with `cat`.
set -euo pipefail
usage="usage: bash benchmarks/collect_wheels.sh FOLDER [GROUP...]"
declare -A groups=(
    [training]="deepspeed einops hjson msgpack ninja psutil py-cpuinfo megatron-core
        pydantic pydantic_core annotated-types typing-inspection httpx2 httpcore2 truststore xxhash"
    [flash-attn-4]="flash-attn-4 quack-kernels apache-tvm-ffi torch-c-dlpack-ext nvidia-cutlass-dsl
        nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-base protobuf"
    [cutlass-libs]="nvidia-cutlass-dsl-libs-cu13"
    [peers]="specforge==0.2.0"
)
case ${1:-} in
"" | -*)
    sed -n '2,/^set -e/s/^# \{0,1\}//p' "$0"
    echo "$usage" >&2
    exit 2
    ;;
esac
folder=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
if ((!$#)); then set -- "${!groups[@]}"; fi
packages=()
for group; do
    if [[ -z ${groups[$group]:-} ]]; then
        echo "collect_wheels.sh: $group: no such group; there are $(printf '%s\n' "${!groups[@]}" | sort | xargs)" >&2
        exit 2
    fi
    read -r -d '' -a more <<<"${groups[$group]}" || true
    packages+=("${more[@]}")
done

# a package as pip should get it: with its version of constraints/, if there is one
pinned() {
    local name=$1
    case $name in
    nvidia-cutlass-dsl-libs-*) name=nvidia-cutlass-dsl ;; # they belong together
    esac
    local pin
    pin=$(grep -hi "^$name==" "$here"/constraints/cuda.txt "$here"/constraints/cpu.txt | head -n 1) || true
    echo "$1${pin#"$name"}"
}

mkdir -p "$folder"
platforms=()
for glibc in 34 28 27 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
for package in "${packages[@]}"; do
    wanted=$(pinned "$package")
    if [[ $package == deepspeed ]]; then
        # of nothing but Python: its operators compile where they are used
        DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$folder" "$wanted"
    else
        "$python" -m pip download --quiet --no-deps --only-binary=:all: "${platforms[@]}" --python-version 3.12 \
            --implementation cp -d "$folder" "$wanted"
    fi
done
(cd "$folder" && du -b --apparent-size -- *.whl | sort -n | awk '
    { printf "%8.1f MB  %s\n", $1 / 1e6, $2; sum += $1 }
    END { printf "%8.1f MB  %d wheels\n", sum / 1e6, NR }')
