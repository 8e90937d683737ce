#!/usr/bin/env bash
# Run the tests: tests/run.sh PYTHON [arguments for pytest]
#
# In two parts, of three processes for two cores each, since most tests wait now and then: those that kill beats
# and servers come last, by themselves. One part may have none of the tests that the arguments choose.
set -uo pipefail

python=$1
shift

run() {
  "$python" -m pytest --numprocesses=3 --dist=loadgroup "$@"
  local status=$?
  [ "$status" = 5 ] && nothing=$((nothing + 1)) && return 0
  return "$status"
}

nothing=0
run -m "not failover" "$@" || exit $?
run -m failover "$@" || exit $?
[ "$nothing" -lt 2 ] || { echo "no test was chosen" >&2; exit 5; }
