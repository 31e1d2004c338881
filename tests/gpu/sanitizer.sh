#!/usr/bin/env bash
# Small cases of all kernels (sanitize.py) under compute-sanitizer: TOOL... (default: memcheck racecheck synccheck), each for LIMIT seconds at most
# (default: 90). OUT (default: build/gpu) receives sanitizer_TOOL.log. The exit status is 0 if nothing was found, 77 if a tool could not run here
# (containers may forbid it) or had too little time, 1 if something was found. PYTHON picks the interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
[ $# -gt 0 ] || set -- memcheck racecheck synccheck

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null) || { echo 'compute-sanitizer: not found' && exit 77; }
"$sanitizer" --version | grep -i version
found=0
incomplete=0
for tool; do
    started=$SECONDS
    log=$OUT/sanitizer_$tool.log
    timeout --kill-after=10 "${LIMIT:-90}" "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" tests/gpu/sanitize.py > "$log" 2>&1
    status=$?
    if [ $status -eq 0 ]; then
        says='nothing found'
    elif [ $status -ge 124 ] && ! grep -qE '=========.*([Ee]rror|Invalid|[Hh]azard)' "$log"; then
        incomplete=1
        says="no time, nothing found until then: $(tail -n 1 "$log")"
    elif grep -q 'the GPU answers' "$log"; then
        found=1
        grep -m 20 '=========' "$log" || tail -n 30 "$log"
        says=FOUND
    else
        incomplete=1
        says="cannot run here: $(tail -n 1 "$log")"
    fi
    echo "$tool: $says (exit status $status, $((SECONDS - started)) s)"
done
[ $found -eq 0 ] || exit 1
[ $incomplete -eq 0 ] || exit 77
