#!/usr/bin/env bash
# Builds, tests and benchmarks the CUDA backend on a machine with a GPU or several, unattended, in less than 10 minutes and without a network.
# $OUT (default: build/gpu) receives log.txt, bench.json, router.json, tune.json, gpus.json and sequences.json (of several GPUs) and, where megatron.core is installed,
# train.csv; the measurements and a table of what passed are printed last.
# PYTHON picks the interpreter, BUDGET the seconds for everything. What MEGATRON_EP_DTYPES leaves out is not tested; by default nothing is.
set -uo pipefail
cd "$(dirname "$0")/../.."

export PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
BUDGET=${BUDGET:-570}
LOGS=$(mktemp -d)
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 MEGATRON_EP_CUDA=1 MEGATRON_EP_DTYPES=${MEGATRON_EP_DTYPES:-all}
results=()
failed=0

finish() {
    for log in "$LOGS"/*.log; do printf '\n######## %s\n' "$(basename "$log" .log)" && cat "$log"; done > "$OUT/log.txt"
    echo "==== bench"
    grep -hE '^[0-9]+(x| GPUs )|^T=|^  (phase|dispatch|combine|return|both|attention|step|copy|forward)' "$LOGS"/*bench.log "$LOGS"/*gate.log "$LOGS"/*tune.log 2> /dev/null
    echo "==== train"
    grep -hE '^(step |loss |[0-9,]+ tokens/s|megatron.core )' "$LOGS"/*train.log 2> /dev/null
    echo "==== summary"
    printf '%s\n' "${results[@]}"
    rm -rf "$LOGS"
}
trap finish EXIT

# The next step's, in the order of the steps.
log_of() { printf '%s/%02d_%s.log' "$LOGS" ${#results[@]} "$1"; }

# result NAME WORD SECONDS LOG
result() { results+=("$(printf '%-12s %-8s %4s s  %s' "$1" "$2" "$3" "$(tail -n 1 "$4" 2> /dev/null | cut -c1-100)")"); }

# step NAME LIMIT COMMAND...: within LIMIT seconds and what is left of the budget; the end of its output is shown when it
# fails. Status 77: this machine cannot run it.
step() {
    local name=$1 limit=$2 started=$SECONDS status log word
    log=$(log_of "$1")
    shift 2
    [ $((BUDGET - SECONDS)) -lt "$limit" ] && limit=$((BUDGET - SECONDS))
    if [ "$limit" -lt 5 ]; then
        failed=1
        result "$name" 'no time' 0 "$log"
        return 1
    fi
    timeout --kill-after=10 "$limit" "$@" > "$log" 2>&1
    status=$?
    case $status in
        0) word=ok ;;
        77) word=skipped ;;
        *)
            failed=1 word=FAILED
            echo "==== $name: exit status $status"
            tail -n 30 "$log"
            ;;
    esac
    result "$name" $word $((SECONDS - started)) "$log"
    return $status
}

test_with() { "$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --maxfail=8 --durations=5 "$@"; }
export -f test_with

step machine 20 nvidia-smi
step build 180 "$PYTHON" setup.py build_ext --inplace ||
    MEGATRON_EP_NVSHMEM=0 MEGATRON_EP_NCCL=0 step build_p2p 150 "$PYTHON" setup.py build_ext --inplace || exit 1
step env 30 "$PYTHON" -m megatron_ep.env
step gpu 60 "$PYTHON" -c 'import torch; print(torch.cuda.get_device_properties(0))' || exit 1
case ${MEGATRON_EP_ARCHITECTURES:-} in
    *virtual*) step translate 300 "$PYTHON" tests/gpu/sanitize.py ;; # the driver compiles PTX when it first loads it, and keeps what it made
esac
step smoke 60 bash -c 'test_with tests/normal/test_dispatch_combine.py -k "many_calls and cuda"'
step dispatch 120 bash -c 'test_with tests/gpu/test_gpu_dispatch_combine.py tests/normal -k "gpu or cuda"'
step launch 60 bash -c 'test_with tests/gpu/test_gpu_launch.py tests/gpu/test_gpu_overlap.py tests/gpu/test_gpu_float8.py'
step sequences 60 bash -c 'test_with tests/gpu/test_gpu_sequences.py'
step router 60 bash -c 'test_with tests/router/test_router.py tests/router/test_router_accuracy.py'
step gate 60 "$PYTHON" tests/bench/run.py router --device cuda --tokens 1 4096 --json "$OUT/router.json"
step processes 90 bash -c 'test_with tests/gpu/test_gpu_one_rank.py'
step low_latency 120 bash -c 'test_with tests/gpu/test_gpu_low_latency.py tests/gpu/test_gpu_low_latency_processes.py'
step few_tokens 90 bash -c 'test_with tests/low_latency -k cuda'
step low_latency_bench 90 "$PYTHON" -m megatron_ep.cli.main bench low-latency --json "$OUT/low_latency.json"
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
    step fabrics 400 bash -c 'test_with tests/gpu/test_gpu_fabrics.py'
    step gpus_bench 90 "$PYTHON" -m megatron_ep.cli.main bench gpus --json "$OUT/gpus.json"
    step sequences_bench 90 "$PYTHON" tests/bench/run.py sequences --json "$OUT/sequences.json"
fi
if "$PYTHON" -c 'import megatron.core, pydantic' > /dev/null 2>&1; then
    step train 90 "$PYTHON" -m megatron_ep.cli.main train recipes/tiny_moe_gpu.yaml --steps 30 --out "$LOGS/train" &&
        cp "$LOGS/train/loss.csv" "$OUT/train.csv"
    step layer_graph 120 bash -c 'test_with tests/gpu/test_gpu_layer_graph.py tests/gpu/test_gpu_chunks.py'
    step fp8_experts 120 bash -c 'test_with tests/gpu/test_gpu_fp8_experts.py'
    step sequences_te 120 bash -c 'test_with tests/gpu/test_gpu_sequences_te.py'
    step train_tests 200 bash -c 'test_with tests/gpu/test_gpu_train.py'
else
    step train 10 bash -c 'echo megatron.core or pydantic is not installed; exit 77'
fi
for tool in memcheck racecheck; do # as long as there is time
    limit=$((BUDGET - SECONDS - 5))
    [ "$limit" -gt 60 ] && limit=60
    [ "$limit" -ge 5 ] && step $tool $((limit + 5)) env OUT="$LOGS" LIMIT="$limit" tests/gpu/sanitizer.sh $tool
done
exit $failed
