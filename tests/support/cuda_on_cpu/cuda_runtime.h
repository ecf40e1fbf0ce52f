// Runs the CUDA sources on the CPU: what they use of cuda_runtime.h. emulation.cpp runs the grid, and finds races.
//
// Blocks run one after the other, the threads of a block as fibers that take turns at barriers and shuffles, so that
// every kernel runs as written. What this cannot show is what only hardware knows, such as memory spaces.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>

#ifdef UNFUSED  // torch's vector code on this CPU rounds a product before it adds
static inline float unfused(float a, float b, float c) { return a * b + c; }
#define fmaf unfused
#endif

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct dim3 {
    unsigned x, y, z = 1;

    dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
};

// ---- Threads ------------------------------------------------------------------------------------------------------

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

void run_grid(dim3 grid, dim3 block, std::function<void()> kernel);
void meet(const char *file, int line);                      // all threads of the block
uint64_t exchange(uint64_t bits, unsigned from);            // all threads of the warp; `from`: a thread of the same
uint32_t atomic_add(uint32_t *address, uint32_t value);     // returns what was there
int count_of_processors();

template <class T>
T shuffle(T value, unsigned from) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a lane holds 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, from);
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace emulation

#define __syncthreads() emulation::meet(__FILE__, __LINE__)

template <class T>
T __shfl_down_sync(unsigned, T value, int distance) {
    unsigned from = threadIdx.x + (unsigned)distance;
    return emulation::shuffle(value, from / 32 == threadIdx.x / 32 ? from : threadIdx.x);
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    unsigned from = threadIdx.x - (unsigned)distance;  // of the first lanes a huge number, and so in no warp of theirs
    return emulation::shuffle(value, from / 32 == threadIdx.x / 32 ? from : threadIdx.x);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulation::shuffle(value, threadIdx.x ^ (unsigned)mask);
}

#define atomicAdd emulation::atomic_add

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <class T>
T __ldcs(const T *address) {
    return *address;
}

template <class T>
void __stcs(T *address, T value) {
    *address = value;
}

inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// ---- The host's side ------------------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
typedef struct CUstream_st *cudaStream_t;

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return "an emulated error"; }

inline cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
    *value = emulation::count_of_processors();
    return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel, int threads, size_t) {
    *blocks = 2048 / threads;
    return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               const Arguments &...arguments) {
    const dim3 grid = config->gridDim;
    if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || config->blockDim.x == 0 || config->blockDim.x > 1024)
        return cudaErrorInvalidConfiguration;
    emulation::run_grid(config->gridDim, config->blockDim, [&] { kernel(arguments...); });
    return cudaSuccess;
}
