#!/usr/bin/env bash
# Puts a build with sanitizers through everything that is asked of the C++ server: its unit tests, then floods,
# faults, the conformance suite and its programs' tests, then calls under random faults.
#
#   cpp_server/sanitize.sh PRESET [TEST...]     PRESET: asan (with UBSan) or tsan
#
# Each TEST is a file or folder for pytest (default: all of the suites). $PYTHON is the interpreter (default:
# .venv/bin/python), $CALLS how many calls under faults (default 20,000; 0: none).
#
# Every process writes what its sanitizer reports into build/cpp/PRESET/reports, so that no report is lost with the
# log of a server whose log is one of the faults. A report there, or a test that fails, is a failure. GCC's UBSan beside
# its ASan does not know of that folder: it reports on stderr and ends the process, which the tests say.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:?name a preset: asan or tsan}
shift
python=${PYTHON:-.venv/bin/python}
tests=("$@")
[[ ${#tests[@]} -gt 0 ]] || tests=(tests/attack tests/conformance tests/cpp/test_cpp_server.py)

PYTHON=$python cpp_server/build.sh "$preset"
built=$PWD/build/cpp/$preset
[[ -x $built/tessera-server ]] || exit 1 # build.sh has said what is missing
reports=$built/reports
rm -rf "$reports"
mkdir "$reports"

# Requests that are too large for memory are to be refused as without a sanitizer. torch, protobuf, nghttp2 and
# OpenSSL are not instrumented: tsan.supp names their libraries, and nothing of ours.
common="allocator_may_return_null=1:log_path=$reports/report"
export ASAN_OPTIONS=$common UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/report"
export TSAN_OPTIONS="$common:suppressions=$PWD/cpp_server/tests/tsan.supp"
export TESSERA_CPP_SERVER=$built/tessera-server

status=0
for program in unit_tests http2_tests front_tests torch_tests; do
  "$built/tests/$program" --gtest_brief=1 || status=1
done
# What starts the Python server alone says nothing of this build; the programs have just been run.
"$python" -m pytest -q -k "(cpp or not python) and not test_unit_tests" "${tests[@]}" || status=1
if [[ ${CALLS:=20000} -gt 0 ]]; then
  "$python" -m tests.attack.faults --server cpp --calls "$CALLS" || status=1
fi
if [[ -n $(ls "$reports") ]]; then
  cat "$reports"/*
  echo "$preset: the reports above are in $reports"
  status=1
fi
exit $status
