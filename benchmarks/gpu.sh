#!/usr/bin/env bash
# Everything that wants a GPU, on one H100 or H200, in under 9 minutes. The most valuable parts come first:
#
#     kernels          whether the kernels are right, and how fast they are
#     golden           golden cases through the engine
#     steps            steps beside their estimates
#     peers            SpecForge's own step beside ours, if SpecForge can be imported (its wheel is enough)
#     largest          the largest contexts
#     specforge2048    our step at a hidden size of 2,048, as SpecForge publishes it
#     agreement        whole steps beside the CPU
#     quickstart       the quickstart, shortened, in the time that is left
#     capture          capture beside SGLang's own prefill, if SGLang is installed; takes 6 minutes more
#     fake             in a dry run, the steps in full size on a fake GPU
#
#     bash benchmarks/gpu.sh                   results in benchmarks/results/gpu-*.json, logs beside them
#     bash benchmarks/gpu.sh steps peers       some parts, always in the order above
#     bash benchmarks/gpu.sh --dry-run         every part on the CPU, with tiny shapes: whether the code runs
#     CUDA_BUILD=/tmp/cuda bash benchmarks/gpu.sh --dry-run
#                                              with fake, too (tests/cuda_build/install.sh)
#     OUT=/tmp/gpu PYTHON=python3.12 bash benchmarks/gpu.sh
#     WHEELS=/tmp/wheels bash benchmarks/gpu.sh
#
# It needs no network and installs nothing, except that packages in the folder WHEELS (collect_wheels.sh fills it) are
# unpacked into a temporary folder. torch 2.11 with Triton 3.6 is enough (benchmarks/torch_bridge). Each part has a time
# limit and saves its results as it goes; all parts but capture end within 530 seconds, in a dry run within five times
# that. The exit code is 1 if a part failed or was cut off, and the last lines name it.
#
# Compiling FlashAttention 4's kernels takes a minute for each kind of draft, so the first run may not get through all
# kinds. They are kept in FLASH4_CACHE (default: ~/.cache/eagle3/flash4, training's own), which can be brought along.
set -u -o pipefail
cd "$(dirname "$0")/.."
parts="kernels golden steps peers largest specforge2048 agreement quickstart capture fake"
dry=0
chosen=()
for argument; do
    case $argument in
    --dry-run) dry=1 ;;
    -h | --help)
        sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *)
        if [[ $argument == -* || " $parts " != *" $argument "* ]]; then
            echo "gpu.sh: $argument: no such part; there are $parts, and the option --dry-run" >&2
            exit 2
        fi
        chosen+=("$argument")
        ;;
    esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${OUT:-benchmarks/results}
((dry)) && out=${OUT:-$work/results}
python=${PYTHON:-python}
total=530
((dry)) && total=$((5 * total)) # a CPU may be busy
export PYTHONPATH=benchmarks/torch_bridge:.${PYTHONPATH:+:$PYTHONPATH}
if [[ -n ${WHEELS:-} ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$work/site" "$WHEELS"/*.whl || exit 1
    # its .pth file would add the second folder, but Python reads none in PYTHONPATH
    export PYTHONPATH=$PYTHONPATH:$work/site:$work/site/nvidia_cutlass_dsl/dsl_packages
    PATH=$work/site/bin:$PATH
fi
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=${FLASH4_CACHE:-~/.cache/eagle3/flash4}
# contexts differ from case to case: memory of one must serve the next
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

if ((!dry)) && ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu.sh: needs a CUDA device and a torch that sees it ($python: no); --dry-run runs every part on the CPU" >&2
    exit 1
fi
mkdir -p "$out"
failed=()

wanted() { ((${#chosen[@]} == 0)) || [[ " ${chosen[*]} " == *" $1 "* ]]; }

# part NAME SECONDS COMMAND...: if it is wanted, runs it with its log in gpu-NAME.log and shows the log's table
part() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    wanted "${name%%-*}" || return
    ((dry)) && limit=$((5 * limit))
    local left=$((total - SECONDS))
    if ((left < limit)); then limit=$left; fi
    if ((limit < 10)); then
        failed+=("$name: not run, no time left")
        return
    fi
    echo "== $name (at most $limit s): $*"
    timeout --kill-after=5 "$limit" "$@" >"$out/gpu-$name.log" 2>&1
    code=$?
    grep -E '^\||beyond their bound|^Peak|kernels|golden|acceptance length|tokens/s|^peak|^waits' "$out/gpu-$name.log" | tail -n 60
    echo "== $name: $((SECONDS - began)) s, exit code $code"
    if ((code == 124 || code == 137)); then
        failed+=("$name: cut off after $limit s; $out/gpu-$name.log")
    elif ((code)); then
        failed+=("$name: exit code $code; $out/gpu-$name.log")
        tail -n 3 "$out/gpu-$name.log"
    fi
}

tiny=()
rank=("$python" benchmarks/one_rank.py --estimates benchmarks/results/gpu_estimates.json)
if ((dry)); then
    tiny=(--device cpu --tiny)
    rank+=("${tiny[@]}")
fi
# tokens N on a GPU are at most a thousandth of them in a dry run, and a window is 8 keys
tokens() { if ((dry)); then echo $(($1 / 1024 + 24)); else echo "$1"; fi; }
repeated=,warm_up=1,repeats=3
steps() {
    local window=$(((dry ? 8 : 512)))
    # SpecForge publishes 115.7 ms for this one, on an H200
    echo "tokens=$(tokens 2944),recompute=none$repeated"
    echo "tokens=$(tokens 8192),recompute=none$repeated"
    echo "tokens=$(tokens 16384),recompute=none$repeated"
    echo "tokens=$(tokens 32768),recompute=none$repeated"
    echo "tokens=$(tokens 131072),recompute=attention_kept"
    echo "tokens=$(tokens 131072),recompute=full"
    echo "tokens=$(tokens 8192),recompute=none,supervised=0.05$repeated"
    echo "tokens=$(tokens 32768),recompute=none,supervised=0.05$repeated"
    echo "tokens=$(tokens 131072),recompute=none,supervised=0.05$repeated"
    echo "tokens=$(tokens 8192),recompute=none,window=$window$repeated"
    echo "tokens=$(tokens 32768),recompute=none,window=$window$repeated"
    echo "tokens=$(tokens 131072),recompute=full,window=$window"
}

# about 15 s of each part go to imports and to making the draft
part kernels 100 "$python" benchmarks/cuda_kernels.py --only kernels "${tiny[@]}" --out "$out/gpu-kernels.json"

# the engine on this device: golden cases in fp32 and bf16, and the kernels of the quickstart's draft
part golden 75 "$python" launchers/doctor.py "output.dir=$work/run"

mapfile -t cases < <(steps)
part steps 130 "${rank[@]}" --out "$out/gpu-steps.json" "${cases[@]/#/--case=}"

# SpecForge's own step and ours, in turn
peers=(--tokens 8192 --repeats 2)
((dry)) && peers=(--device cpu --shape tiny --tokens 64 --rounds 1 --repeats 1)
if ! wanted peers; then
    :
elif "$python" -c 'import importlib.util as u; raise SystemExit(u.find_spec("specforge") is None)' 2>/dev/null; then
    part peers 85 "$python" benchmarks/peers/compare.py "${peers[@]}" --json "$out/gpu-peers.json"
else
    echo "== peers: not run, SpecForge cannot be imported; collect_wheels.sh FOLDER peers downloads its wheel"
fi

# the largest contexts that fit, by their memory alone: everything supervised, and 5%
part largest 110 "${rank[@]}" --out "$out/gpu-largest.json" \
    --case "tokens=$(tokens 131072),recompute=full,inputs=host,largest=1" \
    --case "tokens=$(tokens 1048576),supervised=0.05,recompute=full,largest=1"

# SpecForge publishes 53,419 tokens/s for 4 x 1,024 on one H200
part specforge2048 60 "${rank[@]}" --draft hidden-2048 --out "$out/gpu-specforge2048.json" \
    --case "tokens=$(tokens 4096),documents=4,recompute=none,warm_up=3,repeats=10"

# whole steps on this device beside the CPU
part agreement 40 "$python" benchmarks/cuda_kernels.py --only steps "${tiny[@]}" --out "$out/gpu-agreement.json"

# parts usually end before their limits; these get what is left
brief=(training.max_steps=200 evaluation.conversations=6)
((dry)) && brief=(model.demo.steps=30 model.demo.answers=96 model.demo.answer_tokens=24 training.max_steps=6
    training.checkpoint_every=3 evaluation.every=3 evaluation.conversations=3 evaluation.new_tokens=16)
part quickstart 150 "$python" launchers/train.py --deepspeed ds_configs/zero2.json \
    "output.dir=$work/quickstart" "data.cache_dir=$work/cache" "${brief[@]}"

# two servers of an 8B shape, started and warmed up, then five rounds
if ! wanted capture; then
    :
elif ((dry)); then
    echo "== capture: has no dry run"
elif "$python" -c 'import importlib.metadata as m; m.version("sglang")' 2>/dev/null; then
    total=$((SECONDS + 360))
    part capture 360 "$python" benchmarks/capture.py --json "$out/gpu-capture.json"
else
    echo "== capture: not run, SGLang is not installed"
fi

# the steps in full size: everything but what kernels compute and how long they take
if ((!dry)) || ! wanted fake; then
    :
elif [[ -n ${CUDA_BUILD:-} ]]; then
    mapfile -t cases < <(dry=0 repeated="" steps)
    for case in "${cases[@]}"; do
        total=$((SECONDS + 600))
        part "fake-$case" 120 bash tests/cuda_build/run.sh "$CUDA_BUILD" benchmarks/launches.py "$case" --device h200
    done
else
    echo "== fake: not run; CUDA_BUILD names no folder of tests/cuda_build/install.sh"
fi

rm -f "$out"/gpu-*.partial
echo "gpu.sh: $SECONDS s; results in $out"
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
