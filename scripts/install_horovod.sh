#!/usr/bin/env bash
# Builds Horovod 0.28.1 for the PyTorch of an environment that has one, and installs it there:
#
#     scripts/install_horovod.sh [PYTHON]          # PYTHON: the environment's; default: python
#
# Needs g++ (11 or newer) and CMake (3.13 or newer); takes some ten minutes of two cores. Tried with
# Python 3.11, PyTorch 2.14 and gcc 12 on CPUs. For GPUs set HOROVOD_GPU_OPERATIONS=NCCL first; that
# needs the CUDA toolkit and has not been tried here.
set -euo pipefail

VERSION=0.28.1
PYTHON=${1:-python}

for tool in "$PYTHON" g++ cmake make; do
    if ! command -v "$tool" > /dev/null; then
        echo "install_horovod.sh: error: $tool is missing: install it first" >&2
        exit 2
    fi
done
if ! "$PYTHON" -c 'import torch' 2> /dev/null; then
    echo "install_horovod.sh: error: $PYTHON has no PyTorch: install requirements.txt first" >&2
    exit 2
fi

# Absolute, as the last line is run in another folder.
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What its build imports: without isolation, as it is to be built for the PyTorch that is there.
"$PYTHON" -m pip install 'setuptools<81' wheel packaging cloudpickle psutil pyyaml cffi
"$PYTHON" -m pip download --no-deps --no-build-isolation --no-binary horovod \
    --dest "$work" "horovod==$VERSION"
tar -xzf "$work/horovod-$VERSION.tar.gz" -C "$work"
source="$work/horovod-$VERSION"

# Its last release asks for C++14; the headers of PyTorch need C++17 since 2.1 and C++20 in 2.14.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
    "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"

if [ -z "${HOROVOD_GPU_OPERATIONS:-}" ]; then
    # A PyTorch that could use CUDA makes it look for CUDA's compiler, which CPUs do not need.
    sed -i 's/(torch\.version\.cuda is not None)/False/' "$source/cmake/Modules/FindPytorch.cmake"
    export HOROVOD_CPU_OPERATIONS=GLOO HOROVOD_WITHOUT_GPU=1
fi
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export MAKEFLAGS="-j${MAX_JOBS:-$(nproc)}"
"$PYTHON" -m pip install --no-build-isolation --no-deps "$source"

# Not from the checkout: what is in the current folder would be found first.
cd "$work"
"$PYTHON" -c 'import horovod.torch as hvd; hvd.init(); print("Horovod works:", hvd.gloo_built())'
