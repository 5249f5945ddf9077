#!/usr/bin/env bash
# Everything that wants a GPU, on one H100, in under 9 minutes: what the kernels compute and how fast, steps at the shape
# of a Llama-3.1-8B draft, the largest contexts, and one rank of eight at a million tokens. Where SGLang is installed,
# capture beside its own prefill as well, in 6 minutes more.
#
#     bash benchmarks/gpu.sh                  results in benchmarks/results/gpu-*.json, logs beside them
#     OUT=/tmp/gpu bash benchmarks/gpu.sh     in another folder
#     PYTHON=python3.12 bash benchmarks/gpu.sh
#
# It installs nothing: torch with CUDA and this repository's requirements must be there. Every part has a time limit, and
# none but capture begins or lasts beyond 530 seconds in all; results so far are saved when a part is cut off. The exit
# code is 1 where a part failed or was cut off, and the last lines name it.
set -u -o pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
python=${PYTHON:-python}
total=530
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
# contexts differ from case to case: memory of one must serve the next
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-$PYTORCH_CUDA_ALLOC_CONF}

if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu.sh: needs a CUDA device and a torch that sees it ($python: no); on a CPU run the scripts themselves with --device cpu --tiny" >&2
    exit 1
fi
mkdir -p "$out"
failed=()

# part NAME SECONDS COMMAND...: runs it with its log in gpu-NAME.log and shows the log's table
part() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    local left=$((total - SECONDS))
    if ((left < limit)); then limit=$left; fi
    if ((limit < 10)); then
        failed+=("$name: not run, no time left")
        return
    fi
    echo "== $name (at most $limit s): $*"
    timeout --kill-after=5 "$limit" "$@" >"$out/gpu-$name.log" 2>&1
    code=$?
    grep -E '^\||beyond their bound|^Peak' "$out/gpu-$name.log"
    echo "== $name: $((SECONDS - began)) s, exit code $code"
    if ((code == 124 || code == 137)); then
        failed+=("$name: cut off after $limit s; $out/gpu-$name.log")
    elif ((code)); then
        failed+=("$name: exit code $code; $out/gpu-$name.log")
        tail -n 3 "$out/gpu-$name.log"
    fi
}

# a JSON document on stdout instead of --out
json() {
    local to=$1
    shift
    "$@" >"$to.partial" && mv "$to.partial" "$to"
}
export -f json

rank=("$python" benchmarks/one_rank.py)
repeated=warm_up=1,repeats=3
million=tokens=1048576,recompute=attention_kept

# about 15 s of each part go to imports and to making the draft
part kernels 50 "$python" benchmarks/cuda_kernels.py --out "$out/gpu-kernels.json"

# 4k, 32k and 128k, everything supervised
part steps 110 "${rank[@]}" --out "$out/gpu-steps.json" \
    --case "tokens=4096,recompute=none,$repeated" \
    --case "tokens=32768,recompute=none,$repeated" \
    --case "tokens=32768,recompute=attention_kept,$repeated" \
    --case "tokens=32768,recompute=full,$repeated" \
    --case tokens=131072,recompute=attention_kept \
    --case tokens=131072,recompute=full

# a million tokens: 5% supervised on one GPU; and one rank of eight, everything supervised
part million 250 "${rank[@]}" --out "$out/gpu-million.json" \
    --case "$million,supervised=0.05" \
    --case "$million,ring=8,inputs=host"

# the largest that fit, by their memory alone: everything supervised, and 5%
part largest 120 "${rank[@]}" --out "$out/gpu-largest.json" \
    --case tokens=131072,recompute=full,inputs=host,largest=1 \
    --case tokens=1048576,supervised=0.05,recompute=full,largest=1

# the benchmarks of the CPU on this machine, in what time is left
for name in memory step_time; do
    if [[ -e benchmarks/$name.py ]]; then
        part "$name" 60 bash -c 'json "$@"' json "$out/gpu-$name.json" \
            "$python" "benchmarks/$name.py" --json
    fi
done

# two servers of an 8B shape, started and warmed up, then five rounds
if "$python" -c 'import importlib.metadata as m; m.version("sglang")' 2>/dev/null; then
    total=$((SECONDS + 360))
    part capture 360 "$python" benchmarks/capture.py --json "$out/gpu-capture.json"
else
    echo "== capture: not run, SGLang is not installed"
fi

rm -f "$out"/gpu-*.partial
echo "gpu.sh: $SECONDS s; results in $out"
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
