#!/usr/bin/env bash
# Builds, tests and benchmarks the CUDA backend on a machine with one GPU, unattended, in less than 10 minutes and without a network.
# Logs and measurements go to $OUT (default: build/gpu), a table of what passed comes last. PYTHON picks the interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 MEGATRON_EP_CUDA=1
results=()
failed=0

# step NAME LIMIT COMMAND...: its output goes to NAME.log, the end of it here too when it fails
step() {
    local name=$1 limit=$2 started=$SECONDS status
    shift 2
    timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] || { failed=1; echo "==== $name: exit status $status"; tail -n 30 "$OUT/$name.log"; }
    results+=("$(printf '%-22s %-6s %4d s  %s' "$name" "$([ $status -eq 0 ] && echo ok || echo FAILED)" $((SECONDS - started)) "$(tail -n 1 "$OUT/$name.log" | cut -c1-90)")")
    return $status
}

# A sanitizer that this machine cannot run (containers may forbid it) is said to be skipped; 9 is its word for errors found.
sanitize() {
    local tool=$1 sanitizer
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
    if [ -z "$sanitizer" ]; then
        results+=("$(printf '%-22s %-6s %s' "$tool" skipped 'there is no compute-sanitizer')")
        return
    fi
    timeout --kill-after=10 60 "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" tests/gpu/sanitize.py > "$OUT/$tool.log" 2>&1
    local status=$? word=ok
    [ $status -eq 0 ] || word="skipped ($status)"
    [ $status -eq 9 ] && { word=FAILED; failed=1; grep -m 20 '=========' "$OUT/$tool.log"; }
    results+=("$(printf '%-22s %-6s %s' "$tool" "$word" "$(tail -n 1 "$OUT/$tool.log" | cut -c1-90)")")
}

test_with() { "$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q -x --durations=5 "$@"; }
export -f test_with
export PYTHON

step machine 20 nvidia-smi
step build 180 "$PYTHON" setup.py build_ext --inplace || exit 1
step env 30 "$PYTHON" -m megatron_ep.env
step gpu 60 "$PYTHON" -c 'import torch; print(torch.cuda.get_device_properties(0))' || { printf '%s\n' "${results[@]}"; exit 1; }
step smoke 60 bash -c 'test_with tests/gpu/test_gpu_transfer.py -k "many_calls"'
step transfer 90 bash -c 'test_with tests/gpu/test_gpu_transfer.py'
step launch 60 bash -c 'test_with tests/gpu/test_gpu_launch.py'
step processes 90 bash -c 'test_with tests/gpu/test_gpu_processes.py'
sanitize memcheck
sanitize racecheck
step bench 90 "$PYTHON" -m megatron_ep.bench_cuda --json "$OUT/bench.json"
step tune 60 "$PYTHON" -m megatron_ep.bench_cuda --topology 1x8 --num-sms 12 --channels 16 24 48 --ring-slots 2 8 --json "$OUT/tune.json"

echo "==== bench"
grep -hE '^[0-9]+x|ours|copy|torch_' "$OUT/bench.log" "$OUT/tune.log" 2> /dev/null
echo "==== summary"
printf '%s\n' "${results[@]}"
exit $failed
