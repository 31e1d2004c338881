#!/usr/bin/env bash
# Runs DeepEP's own test files, unchanged, over megatron_ep.deep_ep.
#
#     tests/gpu/deep_ep.sh FOLDER [PROCESSES]
#
# FOLDER: DeepEP's `tests`, of its version 2. PROCESSES: ranks, 2 unless given; where there are fewer GPUs they share these, over gloo.
# $OUT (default: build/deep_ep) receives a log for each run; a table of what passed is printed last. PYTHON picks the interpreter, LIMIT the
# seconds of a run, FLAGS what every run gets, such as "--num-tokens 512".
set -uo pipefail
[ $# -ge 1 ] && [ -d "$1" ] || { echo "usage: tests/gpu/deep_ep.sh FOLDER [PROCESSES]" >&2; exit 2; }
TESTS=$(cd "$1" && pwd)
PROCESSES=${2:-2}
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-300}
OUT=${OUT:-build/deep_ep}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
# The module that has the helpers of these tests comes before the package's own `deep_ep`.
export PYTHONPATH="$PWD/tests/helpers/deep_ep_test_utils:$PWD/megatron_ep/deep_ep/shim:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
export MASTER_PORT=${MASTER_PORT:-8361}
results=()
failed=0

# run NAME FILE FLAG...
run() {
    local name=$1 file=$TESTS/$2 started=$SECONDS status word=ok
    shift 2
    # shellcheck disable=SC2086
    timeout --kill-after=10 "$LIMIT" "$PYTHON" -m megatron_ep.deep_ep "$file" --num-processes "$PROCESSES" "$@" ${FLAGS:-} > "$OUT/$name.log" 2>&1
    status=$?
    if [ $status -ne 0 ]; then
        failed=1 word="FAILED ($status)"
        grep -nE 'Error|error:|assert' "$OUT/$name.log" | tail -n 5
    fi
    results+=("$(printf '%-24s %-14s %4s s  %s' "$name" "$word" $((SECONDS - started)) "$*")")
}

run intranode legacy/test_intranode.py
run low_latency legacy/test_low_latency.py
run ep elastic/test_ep.py --skip-perf-test
run ep_times elastic/test_ep.py --test-first-only

"$PYTHON" -c 'import torch, megatron_ep.deep_ep as d; print("torch", torch.__version__, "deep_ep", d.__version__, torch.cuda.device_count(), "x", torch.cuda.get_device_name())'
git rev-parse --short HEAD 2> /dev/null
printf '%s\n' "${results[@]}"
exit $failed
