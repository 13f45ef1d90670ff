#!/bin/sh
# build.sh CHECKOUT FOLDER: builds GPGPU-Sim from a checkout of github.com/accel-sim/gpgpu-sim_distribution (tried with
# 667834cf and fa235ebc), and the library through which Python uses it.
#
# Takes g++, bison, flex, makedepend (xutils-dev), zlib and CUDA 11: Debian's nvidia-cuda-toolkit (non-free), or another
# that CUDA_INSTALL_PATH names.
set -eu
checkout=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$2"
cd "$2"
folder=$(pwd)

if [ -z "${CUDA_INSTALL_PATH:-}" ]; then
    mkdir -p cuda/bin
    ln -sf /usr/lib/nvidia-cuda-toolkit/bin/nvcc /usr/bin/ptxas /usr/bin/cuobjdump cuda/bin
    ln -sfn /usr/include cuda/include
    export CUDA_INSTALL_PATH="$folder/cuda"
fi

rm -rf sources
git clone --quiet "$checkout" sources
cd sources
# What of its arithmetic is not that of a GPU: fma rounds twice, half precision rounds ties away from zero, s64 to f64 is
# never done. Then what its memory map leaves no room for, and a hash map that newer compilers got a tree for.
sed -i 's/d\.f32 = a\.f32 \* b\.f32 + c\.f32;/d.f32 = fmaf(a.f32, b.f32, c.f32);/
        s/d\.f64 = a\.f64 \* b\.f64 + c\.f64;/d.f64 = fma(a.f64, b.f64, c.f64);/
        s/y\.f64 = y\.s64;/y.f64 = x.s64;/' src/cuda-sim/instructions.cc
sed -i 's/\(#define[ \t]*HALF_ROUND_STYLE[ \t]*\)-1/\11/
        s/\(#define[ \t]*HALF_ROUND_TIES_TO_EVEN[ \t]*\)0/\11/' src/cuda-sim/half.h
sed -i 's/SHARED_MEM_SIZE_MAX = 96 \*/SHARED_MEM_SIZE_MAX = 256 */
        s/LOCAL_MEM_SIZE_MAX = 1 << 14/LOCAL_MEM_SIZE_MAX = 1 << 12/
        s/MAX_STREAMING_MULTIPROCESSORS = 80/MAX_STREAMING_MULTIPROCESSORS = 148/' src/abstract_hardware_model.h
sed -i 's/__GNUC__ >= 4 && __GNUC_MINOR__ >= 3/__GNUC__ > 4 || (__GNUC__ == 4 \&\& __GNUC_MINOR__ >= 3)/' src/tr1_hash_map.h
bash -c 'source setup_environment release && make -j"$(nproc)"' >../build.log 2>&1 ||
    { tail -n 20 ../build.log >&2; exit 1; }
cd ..

objects=$(dirname "$(find sources/build -name ptx.tab.h)")
libraries=$(dirname "$(find sources/lib -name libcudart.so)")
g++ -O1 -shared -fPIC -DCUDART_VERSION=11080 -iquote sources -iquote sources/libcuda -iquote sources/src \
    -iquote "$objects" "-I$CUDA_INSTALL_PATH/include" "$here/bindings.cpp" -o libsimulator.so \
    "-L$libraries" "-Wl,-rpath,$folder/$libraries" -lcudart
echo "built $folder/libsimulator.so"
