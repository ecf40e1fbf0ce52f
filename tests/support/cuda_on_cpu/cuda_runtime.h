// Runs the CUDA sources on the CPU: what they use of cuda_runtime.h, with a launch that emulates the grid.
//
// Blocks run one after the other, the threads of a block as fibers that take turns at barriers and shuffles, so that
// every kernel runs as written. What this cannot show: races, and what only hardware knows, such as memory spaces.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#ifdef UNFUSED  // torch's vector code on this CPU rounds a product before it adds
static inline float unfused(float a, float b, float c) { return a * b + c; }
#define fmaf unfused
#endif

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static  // blocks run one after the other

struct dim3 {
    unsigned x, y, z = 1;

    dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
};

// ---- Threads ------------------------------------------------------------------------------------------------------

namespace emulation {

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
};

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> kernel;
inline Barrier block_barrier, warp_barriers[32];
inline double lanes[1024];
inline int processors = 1;

}  // namespace emulation

inline dim3 threadIdx(0, 0), blockIdx(0, 0), blockDim, gridDim;

namespace emulation {

inline void wait(Barrier &barrier, unsigned threads) {
    unsigned generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    do swapcontext(&fibers[threadIdx.x].context, &scheduler);
    while (barrier.generation == generation);
}

inline void run_fiber() {
    kernel();
    fibers[threadIdx.x].done = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

inline void run_block(unsigned threads) {
    constexpr size_t stack = 64 << 10;
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned t = 0; t < threads; ++t) {
        Fiber &fiber = fibers[t];
        if (!fiber.stack) fiber.stack.reset(new char[stack]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = stack;
        fiber.done = false;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (unsigned alive = threads, turns = 0; alive > 0; ++turns) {
        if (turns > 100000) {
            fprintf(stderr, "emulation: threads wait at a barrier that others never reach\n");
            abort();
        }
        for (unsigned t = 0; t < threads; ++t) {
            if (fibers[t].done) continue;
            threadIdx.x = t;
            swapcontext(&scheduler, &fibers[t].context);
            alive -= fibers[t].done;
        }
    }
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block_barrier, blockDim.x); }

inline double __shfl_down_sync(unsigned, double value, int distance) {
    unsigned thread = threadIdx.x, from = thread + (unsigned)distance;
    emulation::Barrier &warp = emulation::warp_barriers[thread / 32];
    emulation::lanes[thread] = value;
    emulation::wait(warp, 32);
    double result = from / 32 == thread / 32 ? emulation::lanes[from] : value;
    emulation::wait(warp, 32);
    return result;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    static_assert(sizeof(T) <= sizeof(double), "a lane holds 8 bytes");
    unsigned thread = threadIdx.x;
    emulation::Barrier &warp = emulation::warp_barriers[thread / 32];
    memcpy(&emulation::lanes[thread], &value, sizeof value);
    emulation::wait(warp, 32);
    T result;
    memcpy(&result, &emulation::lanes[thread ^ (unsigned)mask], sizeof result);
    emulation::wait(warp, 32);
    return result;
}

inline uint32_t atomicAdd(uint32_t *address, uint32_t value) {  // threads take turns at barriers only
    uint32_t old = *address;
    *address += value;
    return old;
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
    *value = emulation::processors;
    return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               const Arguments &...arguments) {
    const dim3 grid = config->gridDim;
    if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || config->blockDim.x == 0 || config->blockDim.x > 1024)
        return cudaErrorInvalidConfiguration;
    gridDim = config->gridDim;
    blockDim = config->blockDim;
    emulation::kernel = [&] { kernel(arguments...); };
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) emulation::run_block(blockDim.x);
    return cudaSuccess;
}

// For tests: results must not depend on the GPU's size.
extern "C" __attribute__((visibility("default"), used, weak)) void emulation_processors(int count) {
    emulation::processors = count;
}
