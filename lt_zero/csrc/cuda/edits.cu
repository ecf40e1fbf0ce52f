// Master weights take over the elements of their 16-bit copies that were edited.
//
// Notes:
// - 6 bytes an element are read; a thread writes only if one of its elements was edited.
#include "launch.cuh"
#include "view.cuh"

namespace lt_cuda {

enum { MASTER, SHOWN };

struct Edits {
    Batch<2> batch;
};

template <class Shown>
LT_DEVICE float rounded(float x) {
    Shown to;
    narrow(x, to);
    return widen(to);
}

template <class Shown>
__global__ void __launch_bounds__(kThreads) edits_kernel(const __grid_constant__ Edits edits) {
    constexpr int kWidth = kAccess<float, Shown>;
    for_each_chunk(edits.batch, [&](const Chunk &chunk) {
        View<float> master(edits.batch, MASTER, chunk);
        View<Shown> shown(edits.batch, SHOWN, chunk);
        bool aligned = master.template aligned<kWidth>() && shown.template aligned<kWidth>();
        for_each_element<kWidth>(chunk, aligned, [&](auto width, int64_t i) {
            constexpr int W = decltype(width)::value;
            Lanes<W> m = master.template load<W>(i), s = shown.template load<W>(i);
            bool edited = false;
#pragma unroll
            for (int k = 0; k < W; ++k) {
                if (rounded<Shown>(m[k].x) != s[k].x) {
                    m[k] = s[k];
                    edited = true;
                }
            }
            if (edited) master.template store<W>(i, m);
        });
    });
}

using EditsKernel = void (*)(const Edits);

EditsKernel pick_edits(int shown) {
    switch (shown) {
        case LT_BF16: return edits_kernel<bf16>;
        case LT_FP16: return edits_kernel<fp16>;
        default: return nullptr;
    }
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_take_edits(const lt_pairs *p, void *stream) {
    if (!p || p->dst_dtype != LT_FP32 || !lists_valid(p->count, p->numel, {p->dst, p->src})) return LT_BAD_ARGUMENT;
    EditsKernel kernel = pick_edits(p->src_dtype);
    if (!kernel) return LT_BAD_ARGUMENT;
    Edits edits = {};
    return for_each_batch(edits.batch, p->count, p->numel, {p->dst, p->src},
                          [&] { return launch_chunks(kernel, edits.batch.chunks(), stream, edits); });
}
