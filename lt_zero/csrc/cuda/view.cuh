// One tensor of a batch as a kernel reads and writes it: elements of any format in memory, Float in registers.
//
// Notes:
// - An access is 16 bytes a thread for the widest format among a kernel's tensors, and as many elements (8 bytes) for
//   the others. With more elements, fp32 would take two accesses, each with gaps between the threads of a warp.
// - Only the alignment of the element type is promised. `aligned` decides at run time, per chunk; chunks begin at
//   multiples of kChunk, so that an aligned tensor has aligned chunks.
// - What a step reads or writes once (gradients, states) is the first to leave the L2 cache, and so makes way for what
//   is read again soon, such as the weights.
#pragma once

#include "batch.cuh"

namespace lt_cuda {

template <int W>
struct Lanes {
    Float lane[W];

    LT_DEVICE Float &operator[](int k) { return lane[k]; }
};

template <class T, int W>
struct alignas(sizeof(T) * W) Pack {
    T lane[W];
};

// Elements of one access by a kernel over tensors of these formats.
template <class... T>
constexpr int kAccess = ((sizeof(T) == sizeof(float)) || ...) ? 4 : 8;

// How a call's lists name a tensor that is not there, where a dtype is asked for.
constexpr int kAbsent = -1;

enum Caching { KEPT, STREAMED };

// The unsigned integer, or vector of them, of so many bytes.
template <size_t BYTES>
struct WordOf;
template <>
struct WordOf<2> {
    using type = unsigned short;
};
template <>
struct WordOf<4> {
    using type = unsigned;
};
template <>
struct WordOf<8> {
    using type = uint2;
};
template <>
struct WordOf<16> {
    using type = uint4;
};
template <class P>
using Word = typename WordOf<sizeof(P)>::type;

template <Caching CACHING, class P>
LT_DEVICE P load_pack(const P *address) {
    if constexpr (CACHING == KEPT) {
        return *address;
    } else {
        P pack;
        const Word<P> word = __ldcs((const Word<P> *)address);
        memcpy(&pack, &word, sizeof pack);
        return pack;
    }
}

template <Caching CACHING, class P>
LT_DEVICE void store_pack(P *address, const P &pack) {
    if constexpr (CACHING == KEPT) {
        *address = pack;
    } else {
        Word<P> word;
        memcpy(&word, &pack, sizeof pack);
        __stcs((Word<P> *)address, word);
    }
}

template <class T, Caching CACHING = KEPT>
class View {
  public:
    template <int N>
    LT_DEVICE View(const Batch<N> &batch, int list, const Chunk &chunk) : View(address_of(batch, list, chunk)) {}

    explicit LT_DEVICE View(void *address) : data((T *)address) {}

    template <int W>
    LT_DEVICE bool aligned() const {
        return (uintptr_t)data % sizeof(Pack<T, W>) == 0;
    }

    template <int W>
    LT_DEVICE Lanes<W> load(int64_t i) const {
        Pack<T, W> pack = load_pack<CACHING>((const Pack<T, W> *)(data + i));
        Lanes<W> values;
#pragma unroll
        for (int k = 0; k < W; ++k) values[k] = Float(widen(pack.lane[k]));
        return values;
    }

    template <int W>
    LT_DEVICE void store(int64_t i, Lanes<W> values) const {
        Pack<T, W> pack;
#pragma unroll
        for (int k = 0; k < W; ++k) narrow(values[k].x, pack.lane[k]);
        store_pack<CACHING>((Pack<T, W> *)(data + i), pack);
    }

  private:
    T *data;
};

// A tensor that is not there: always aligned, loads zeros, stores nothing.
template <Caching CACHING>
class View<None, CACHING> {
  public:
    template <int N>
    LT_DEVICE View(const Batch<N> &, int, const Chunk &) {}

    template <int W>
    LT_DEVICE bool aligned() const {
        return true;
    }

    template <int W>
    LT_DEVICE Lanes<W> load(int64_t) const {
        Lanes<W> zeros;
        for (int k = 0; k < W; ++k) zeros[k] = Float(0.0f);
        return zeros;
    }

    template <int W>
    LT_DEVICE void store(int64_t, Lanes<W>) const {}
};

// Weights, or a copy of them. Their dtype is known at run time only, a branch that all threads take the same way: as a
// template parameter it would make several times as many kernels, all for one or two instructions.
class WeightView {
  public:
    template <int N>
    LT_DEVICE WeightView(const Batch<N> &batch, int list, const Chunk &chunk, int dtype)
        : address(address_of(batch, list, chunk)), dtype(dtype) {}

    template <int W>
    LT_DEVICE bool aligned() const {
        return (uintptr_t)address % (dtype == LT_FP32 ? sizeof(Pack<float, W>) : sizeof(Pack<bf16, W>)) == 0;
    }

    // Of fp32 and bf16.
    template <int W>
    LT_DEVICE Lanes<W> load(int64_t i) const {
        return dtype == LT_BF16 ? View<bf16>(address).template load<W>(i) : View<float>(address).template load<W>(i);
    }

    template <int W>
    LT_DEVICE void store(int64_t i, Lanes<W> values) const {
        switch (dtype) {
            case LT_FP32: return View<float>(address).template store<W>(i, values);
            case LT_BF16: return View<bf16>(address).template store<W>(i, values);
            case LT_FP16: return View<fp16>(address).template store<W>(i, values);
            default: return;  // kAbsent; its address is null, and so aligned
        }
    }

  private:
    void *address;
    int dtype;
};

}  // namespace lt_cuda
