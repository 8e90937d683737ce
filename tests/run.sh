#!/usr/bin/env bash
# Run the tests: tests/run.sh PYTHON [arguments for pytest]
#
# In two parts: what computes first, one process for each of two cores; then the tests that kill beats and
# servers, which mostly wait, in three. One part may have none of the tests that the arguments choose.
set -uo pipefail

python=$1
shift

run() {
  "$python" -m pytest --dist=loadgroup "$@"
  local status=$?
  [ "$status" = 5 ] && nothing=$((nothing + 1)) && return 0
  return "$status"
}

nothing=0
run --numprocesses=2 -m "not failover" "$@" || exit $?
run --numprocesses=3 -m failover "$@" || exit $?
[ "$nothing" -lt 2 ] || { echo "no test was chosen" >&2; exit 5; }
