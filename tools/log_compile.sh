#!/bin/sh
# Compiler launcher: keeps a compilation's output (ptxas' report) and CPU time beside its object, as <object>.log.
# On success nothing is printed, so that the build's own progress stays readable.
object='' previous=''
for argument; do
  [ "$previous" = "-o" ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
log=$object.log
"$@" >"$log" 2>&1
status=$?
[ $status -eq 0 ] || cat "$log" >&2
{ echo "cpu time of this script, then of its children (user, system):" && times; } >>"$log"
exit $status
