#!/usr/bin/env bash
# What only a host with four GPUs can show, unattended, within BUDGET seconds (default: 570). A step that has passed leaves OUT/NAME.ok and is
# not repeated: start it again, with the same OUT (default: build/four), until nothing is left.
# PEERS: a folder with run_peers.sh, which times this project beside others. MEGATRON_LM: a tree of Megatron-LM 0.19, for the training step, which
# also needs Transformer Engine. PYTHON picks the interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-570}
OUT=$(realpath -m "${OUT:-build/four}")
mkdir -p "$OUT"
export OUT PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 MEGATRON_EP_CUDA=1 MEGATRON_EP_DTYPES=${MEGATRON_EP_DTYPES:-all}
left=()

# step NAME LIMIT COMMAND...
step() {
    local name=$1 limit=$2 started=$SECONDS
    shift 2
    [ -e "$OUT/$name.ok" ] && echo "$name: done before" && return
    [ $((BUDGET - SECONDS)) -lt "$limit" ] && limit=$((BUDGET - SECONDS))
    if [ "$limit" -ge 20 ] && timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1; then
        touch "$OUT/$name.ok"
        echo "$name: ok, $((SECONDS - started)) s"
    else
        left+=("$name")
        echo "$name: LEFT after $((SECONDS - started)) s: $(tail -n 1 "$OUT/$name.log" 2> /dev/null)"
    fi
}

"$PYTHON" -c 'import xdist' 2> /dev/null && workers='-n 8' || workers=''
tests() { echo "$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --durations=5 "$workers" "$@"; }

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
[ "${gpus:-0}" -ge 4 ] || { echo "$PYTHON finds ${gpus:-no torch and no} GPUs, not 4" && exit 2; }
"$PYTHON" setup.py build_ext --inplace > "$OUT/build.log" 2>&1 || { tail "$OUT/build.log" && exit 1; }
step fabrics 420 $(tests tests/gpu/test_gpu_fabrics.py)
step low_latency 180 $(tests tests/gpu/test_gpu_low_latency*.py)
step processes 90 $(tests tests/gpu/test_gpu_one_rank.py)
step one_gpu 120 $(tests tests/gpu/test_gpu_{dispatch_combine,launch,float8,overlap}.py)
step shared 120 $(tests tests/normal tests/low_latency -k cuda)
[ -n "${PEERS:-}" ] && step peers 420 "$PEERS/run_peers.sh"
step bench 90 "$PYTHON" -m megatron_ep.cli.main bench gpus --json "$OUT/gpus.json"
step low_latency_bench 60 "$PYTHON" -m megatron_ep.cli.main bench low-latency --json "$OUT/low_latency.json"
eval "$("$PYTHON" tests/helpers/megatron_trees.py)"
if [ -n "$MEGATRON_LM" ]; then
    step train 240 $(tests tests/gpu/test_gpu_train.py)
    step layer_graph 120 $(tests tests/gpu/test_gpu_layer_graph.py)
    step fp8_experts 120 $(tests tests/gpu/test_gpu_fp8_experts.py)
    step script 400 $(workers= tests tests/gpu/test_gpu_script.py)
    # A case takes about a minute.
    slice() { step "$1" 470 env OUT="$OUT/$1" BUDGET=460 "$PYTHON" tests/gpu/train_slice.py "${@:2}"; }
    slice slice {"ours, 24 SMs",all-to-all}{,", even load",", overlap"}
    slice slice_sms "ours, "{16,8}" SMs"{,", overlap"} "ours, 24 SMs, "{"fused router","fp8 rows","probs on combine"}
    slice slice_fp8 {ours,all-to-all}", fp8 "{tensorwise,blockwise}
fi
echo "left: ${left[*]:-nothing}"
[ ${#left[@]} -eq 0 ]
