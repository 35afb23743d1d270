#!/usr/bin/env bash
# Builds the C++ server where it can be built, and otherwise says what is missing.
#
#   cpp_server/build.sh [PRESET]     PRESET: release (default), debug, asan, tsan or fuzz
#
# The result is build/cpp/PRESET/tessera-server. LibTorch is the one inside the torch wheel of
# $PYTHON (default: .venv/bin/python). Missing Debian packages are installed when this runs as
# root with apt-get; otherwise their names are printed and the script ends with status 0, so
# that everything that needs no C++ goes on. $JOBS is the number of compilers at once.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
python=${PYTHON:-.venv/bin/python}
packages=(
  cmake ninja-build g++ pkg-config protobuf-compiler protobuf-compiler-grpc libgrpc++-dev
  libprotobuf-dev libnghttp2-dev prometheus-cpp-dev nlohmann-json3-dev libssl-dev zlib1g-dev
  libyaml-cpp-dev libgtest-dev
)

missing() {
  local tool header
  for tool in cmake:cmake ninja:ninja-build g++:g++ pkg-config:pkg-config \
    protoc:protobuf-compiler grpc_cpp_plugin:protobuf-compiler-grpc; do
    command -v "${tool%%:*}" >/dev/null || echo "${tool##*:}"
  done
  for header in grpcpp/grpcpp.h:libgrpc++-dev google/protobuf/message.h:libprotobuf-dev \
    nghttp2/nghttp2.h:libnghttp2-dev \
    prometheus/text_serializer.h:prometheus-cpp-dev nlohmann/json.hpp:nlohmann-json3-dev \
    openssl/evp.h:libssl-dev zlib.h:zlib1g-dev yaml-cpp/parser.h:libyaml-cpp-dev \
    gtest/gtest.h:libgtest-dev; do
    compgen -G "/usr/include/${header%%:*}" >/dev/null ||
      compgen -G "/usr/include/*-linux-gnu/${header%%:*}" >/dev/null ||
      compgen -G "/usr/local/include/${header%%:*}" >/dev/null || echo "${header##*:}"
  done
}

lacking=$(missing)
if [[ -n $lacking && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "installing what the C++ server needs: ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -q && apt-get install -y -q --no-install-recommends "${packages[@]}"; } \
    >/dev/null 2>&1 || echo "apt-get could not install them"
  lacking=$(missing)
fi
if [[ -n $lacking ]]; then
  echo "the C++ server is not built: missing $(tr '\n' ' ' <<<"$lacking")"
  echo "on Debian: apt-get install ${packages[*]}"
  exit 0
fi
if ! torch_dir=$("$python" -c '
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("torch")
sys.exit(1) if spec is None else print(pathlib.Path(spec.origin).parent / "share/cmake/Torch")'); then
  echo "the C++ server is not built: $python has no torch (run make install first)"
  exit 0
fi
version=$("$python" -c 'import tessera; print(tessera.__version__)')
launcher=()
targets=(all)
clang=$(compgen -c | grep -E '^clang\+\+(-[0-9]+)?$' | sort -V | tail -1 || true)
if [[ $preset == fuzz ]]; then # the fuzzers alone: Clang's warnings are not held for the rest
  [[ -n $clang ]] || { echo "the fuzzers are not built: apt-get install clang libclang-rt-dev"; exit 0; }
  launcher+=(-DCMAKE_CXX_COMPILER="$clang")
  targets=(fuzz_request fuzz_package fuzz_http2 fuzz_http)
elif [[ $preset == tsan && -n $clang ]]; then # tests/tsan.supp was made with it
  clang=$(command -v "$clang")
  launcher+=(-DCMAKE_CXX_COMPILER="$clang")
  # A folder that another compiler has built in cannot change it.
  cache=build/cpp/tsan/CMakeCache.txt
  if [[ -f $cache ]] && ! grep -qx "CMAKE_CXX_COMPILER:[A-Z]*=$clang" "$cache"; then
    rm -r build/cpp/tsan
  fi
fi
# What one checkout has compiled is there for another: paths in it are relative for ccache.
if command -v ccache >/dev/null; then
  launcher+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD}
fi
build=build/cpp/$preset
log=$build.configure.log
mkdir -p build/cpp
(cd cpp_server && cmake --preset "$preset" -DTorch_DIR="$torch_dir" -DTESSERA_VERSION="$version" \
  "${launcher[@]}") >"$log" 2>&1 || { cat "$log"; exit 1; }
cmake --build "$build" --target "${targets[@]}" \
  --parallel "${JOBS:-$(nproc)}" -- --quiet

# The operators as well, for that server alone (src/model/operator_libraries.cc): their atomics order what
# ThreadSanitizer sees the server read and write.
if [[ $preset == tsan ]]; then
  cmake -S kernels -B "$build/operators" -G Ninja -DTORCH_ROOT="${torch_dir%/share/cmake/Torch}" \
    -DTESSERA_CUDA=OFF -DTESSERA_SANITIZE=thread -DTESSERA_LIBRARY_FOLDER="$PWD/$build/lib" \
    "${launcher[@]}" >>"$log" 2>&1 || { cat "$log"; exit 1; }
  cmake --build "$build/operators" --target tessera_ops --parallel "${JOBS:-$(nproc)}" -- --quiet
fi
