#!/usr/bin/env bash
# Runs the given ThreadSanitizer binaries. tsan_NAME must exit 0; tsan_NAME_negative holds a planted race, and a run in
# which ThreadSanitizer does not report it is a failure. Exits 1 when any binary does not do what its name promises.
set -uo pipefail

readonly LIMIT_S=300
readonly RACE_EXIT=66
export TSAN_OPTIONS="exitcode=$RACE_EXIT halt_on_error=0"

if [ $# -eq 0 ]; then
    echo "tsan: there are no tests/csrc/tsan_*.cpp to run" >&2
    exit 1
fi

# The run-time library of gcc 12 refuses the address layouts of kernels with vm.mmap_rnd_bits > 28; a fixed layout works.
fixed_layout=()
if setarch -R true 2>/dev/null; then fixed_layout=(setarch -R); fi

failed=0
for binary in "$@"; do
    name=$(basename "$binary")
    log=$binary.log
    timeout "$LIMIT_S" "${fixed_layout[@]}" "$binary" >"$log" 2>&1
    status=$?
    reports=$(grep -c "^WARNING: ThreadSanitizer: data race" "$log")
    case $name in
        *_negative) expected="the planted race reported"; ok=$((status == RACE_EXIT && reports > 0)) ;;
        *) expected="exit 0 and no report"; ok=$((status == 0 && reports == 0)) ;;
    esac
    if [ "$ok" -eq 1 ]; then
        echo "tsan: ok      $name: $expected"
    else
        tail -n 80 "$log"
        echo "tsan: FAILED  $name: expected $expected; exit status $status, $reports data races (whole output: $log)"
        failed=1
    fi
done
exit "$failed"
