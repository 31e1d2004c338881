#!/usr/bin/env bash
# The GPU tests with kernels that sleep for random times at every flag, of SEED (default: 1); further arguments go to pytest. In
# the end the extension is built as the tests take it, with sums of all types. PYTHON picks the interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" MEGATRON_EP_CUDA=1 MEGATRON_EP_DTYPES=${MEGATRON_EP_DTYPES:-all}
build() { MEGATRON_EP_DELAYS=$1 "$PYTHON" setup.py build_ext --inplace; }

trap 'build "" > /dev/null' EXIT
build "${SEED:-1}" || exit 1
"$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --durations=5 -k "gpu or cuda" "$@" \
    tests/normal tests/low_latency tests/gpu/test_gpu_dispatch_combine.py tests/gpu/test_gpu_fabrics.py tests/gpu/test_gpu_low_latency.py tests/gpu/test_gpu_low_latency_processes.py
