# What .ci/run and .ci/nightly have in common; to be sourced in the project's root.
export PIP_NO_COMPILE=1 # only what is imported gets compiled, when it is, and once: torch and Megatron take ten seconds
unset PYTHONDONTWRITEBYTECODE
failures=()

# step SECONDS COMMAND...: the limit ends what hangs
step() {
    local limit=$1 started=$SECONDS
    shift
    echo "::: $*"
    timeout --kill-after=10 "$limit" "$@" || failures+=("$* (exit status $?)")
    echo "::: $* took $((SECONDS - started)) s"
}

# Exports where Megatron-LM's trees are, and says which tests are not run for want of one.
find_trees() {
    eval "$(.venv/bin/python tests/helpers/megatron_trees.py)"
}

finish() {
    if [ ${#failures[@]} -gt 0 ]; then
        printf 'FAILED: %s\n' "${failures[@]}"
        exit 1
    fi
    echo "all checks passed in $SECONDS s"
}
