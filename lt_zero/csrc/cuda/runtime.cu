// What callers ask about the library itself, and how it is built.
//
//   nvcc -std=c++17 -O3 -fmad=false -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off
//        -gencode arch=compute_90,code=sm_90 --threads 0 -shared -cudart static -o lt_zero_cuda.so *.cu
//
// Notes:
// - Equal results need -fmad=false for the device, and -ffp-contract=off for the host, where make_rule computes in fp64
//   and compilers for Arm fuse unless told not to. -use_fast_math would break both.
// - The runtime is linked statically, so that the library needs nothing but the driver, whatever CUDA torch brings.
//   Its symbols are hidden, and so never mixed up with those of torch's own runtime.
#include "launch.cuh"

using namespace lt_cuda;

LT_EXPORT int lt_cuda_abi(void) { return LT_ABI_VERSION; }

LT_EXPORT const char *lt_cuda_error(int code) {
    if (code > LT_CUDA_ERROR) return cudaGetErrorString((cudaError_t)(code - LT_CUDA_ERROR));
    switch (code) {
        case LT_OK: return "no error";
        case LT_BAD_ARGUMENT: return "bad argument: a missing array, a negative size or an unknown dtype";
        case LT_OUT_OF_MEMORY: return "out of host memory";
        default: return "unknown error";
    }
}

// Two fp64 sums for each chunk (reduce.cuh); -1 for sizes that are none.
LT_EXPORT int64_t lt_cuda_scratch(int64_t count, const int64_t *numel) {
    if (!lists_valid(count, numel, {})) return -1;
    int64_t chunks = 0;
    for (int64_t i = 0; i < count; ++i) chunks += chunks_of(numel[i]);
    return chunks * 2 * (int64_t)sizeof(double);
}
