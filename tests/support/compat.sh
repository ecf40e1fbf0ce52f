#!/bin/sh
# Prints the versions in FOLDER/venv, and runs tests of FOLDER/source with it. `make compat` calls it:
#
#     COMPILER=none JOBS=1 tests/support/compat.sh FOLDER TEST...
#
# COMPILER=none: PATH has links to all programs except compilers, and kernels that were built before are not found. The
# tests of kernels in tests/kernels need a compiler, and fail.
set -eu
folder=$(cd "$1" && pwd)
shift
if [ "${COMPILER:-}" = none ]; then
    rm -rf "$folder/bin" && mkdir "$folder/bin"
    for place in $(echo "$PATH" | tr : ' '); do
        find -L "$place" -maxdepth 1 -type f -executable ! -name 'c++*' ! -name cc ! -name 'c[89]9*' ! -name 'clang*' \
            ! -name '*g++*' ! -name 'gcc*' ! -name '*-gcc*' ! -name 'cpp*' ! -name nvcc \
            -exec ln -s -t "$folder/bin" {} + 2>/dev/null || true  # a name that comes twice is linked once
    done
    export PATH="$folder/bin" LT_ZERO_CACHE="$folder/no_kernels"
    unset CC CXX NVCC CUDA_HOME
fi
"$folder/venv/bin/python" - <<'EOF'
import importlib.metadata as installed
import platform

names = ("torch", "lightning", "torchmetrics", "pydantic", "omegaconf", "hydra-core", "numpy")
print("Python", platform.python_version(), *(f"{name} {installed.version(name)}" for name in names), sep=", ")
EOF
cd "$folder/source"
exec ../venv/bin/python -m pytest -n "${JOBS:-3}" --dist loadfile "$@"
