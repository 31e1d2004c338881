#!/bin/sh
# keep_log.sh COMPILER ... -o OBJECT ...: compiles, and keeps what the compiler says in OBJECT.log
for argument; do
    [ "$previous" = -o ] && log=$argument.log
    previous=$argument
done
"$@" > "$log" 2>&1 && exit
status=$?
cat "$log" >&2
exit $status
