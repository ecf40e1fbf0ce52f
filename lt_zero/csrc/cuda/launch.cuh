// The host's side of every call: arguments are checked before the first launch, and every launch is checked.
//
// Notes:
// - Launches go to the thread's current device, which the caller makes the stream's. The library has a CUDA runtime of
//   its own (linked statically) that shares the device's primary context, and with it memory and streams, with torch's.
// - A call may be captured in a CUDA graph: it only launches kernels, and their parameters are copied by the launch.
#pragma once

#include <initializer_list>
#include <mutex>

#include "batch.cuh"

namespace lt_cuda {

inline int error_code(cudaError_t error) { return error == cudaSuccess ? LT_OK : LT_CUDA_ERROR + (int)error; }

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, void *stream, const Arguments &...arguments) {
    static_assert((sizeof(Parameters) + ... + 0) <= kParameterBytes, "too many kernel parameters");
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.stream = (cudaStream_t)stream;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    // This also clears the error, so that the next call does not report it again.
    cudaError_t recorded = cudaGetLastError();
    return error_code(error != cudaSuccess ? error : recorded);
}

// How many blocks of kThreads threads of `kernel` a device runs at once.
template <class... Parameters>
cudaError_t resident_blocks(void (*kernel)(Parameters...), int64_t *blocks) {
    struct Known {
        void (*kernel)(Parameters...);
        int device, blocks;  // per SM
    };
    constexpr int capacity = 64;
    static std::mutex lock;
    static Known known[capacity];
    static int count = 0;
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    std::lock_guard<std::mutex> held(lock);
    int at = 0;
    while (at < count && (known[at].kernel != kernel || known[at].device != device)) ++at;
    Known found = {kernel, device, 0};
    if (at < count) {
        found = known[at];
    } else {
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found.blocks, kernel, kThreads, 0);
        if (error == cudaSuccess && count < capacity) known[count++] = found;
    }
    *blocks = (int64_t)processors * found.blocks;
    return error;
}

// A kernel over the chunks of each row. A grid without blocks is an error to CUDA, hence no launch without chunks. Blocks
// that waited for a place would run when the others are done, on a device that is then half empty.
template <class... Parameters, class... Arguments>
int launch_rows(void (*kernel)(Parameters...), int64_t chunks, int64_t rows, void *stream,
                const Arguments &...arguments) {
    if (chunks == 0 || rows == 0) return LT_OK;
    int64_t most = 0;
    cudaError_t error = resident_blocks(kernel, &most);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return error_code(error);
    }
    most = most > rows ? most / rows : 1;
    return launch(kernel, dim3((unsigned)(chunks < most ? chunks : most), (unsigned)rows), kThreads, stream,
                  arguments...);
}

// A kernel over a batch's chunks.
template <class... Parameters, class... Arguments>
int launch_chunks(void (*kernel)(Parameters...), int64_t chunks, void *stream, const Arguments &...arguments) {
    return launch_rows(kernel, chunks, 1, stream, arguments...);
}

// Lists that a call reads or writes: there, and with a pointer for each tensor that has elements.
inline bool lists_valid(int64_t count, const int64_t *numel, std::initializer_list<List> lists) {
    if (count < 0) return false;
    if (count == 0) return true;
    if (!numel) return false;
    for (const List &list : lists)
        if (!list.data) return false;
    for (int64_t i = 0; i < count; ++i) {
        if (numel[i] < 0) return false;
        for (const List &list : lists)
            if (numel[i] > 0 && !list[i]) return false;
    }
    return true;
}

inline bool is_dtype(int dtype) { return dtype == LT_FP32 || dtype == LT_BF16 || dtype == LT_FP16; }

// The dtypes of master weights and their copies, and what rounds them at random.
inline bool weights_valid(const lt_tensors *t) {
    if (t->param_dtype == LT_FP32) return !t->places && (!t->out || is_dtype(t->out_dtype));
    return t->param_dtype == LT_BF16 && (!t->out || t->out_dtype == LT_BF16) &&
           (!t->places || t->count == 0 || t->place_count > 0);
}

// With `states` optimizer states.
inline bool tensors_valid(const lt_tensors *t, int states) {
    return t && weights_valid(t) && is_dtype(t->grad_dtype) && (t->state_dtype == LT_FP32 || t->state_dtype == LT_BF16) &&
           lists_valid(t->count, t->numel, {t->param, t->grad}) &&
           (states < 1 || lists_valid(t->count, t->numel, {t->state1})) &&
           (states < 2 || lists_valid(t->count, t->numel, {t->state2})) &&
           (!t->out || lists_valid(t->count, t->numel, {t->out}));
}

}  // namespace lt_cuda
