// What each instruction set offers to api.cpp: every kernel for the elements [lo, hi) of one tensor of a list.
#pragma once

#include "cpu/attention_table.h"
#include "lt_zero.h"

struct Kernels {
    const char *isa;
    void (*adam)(const lt_tensors &, const lt_adam &, int64_t tensor, int64_t lo, int64_t hi);
    void (*lion)(const lt_tensors &, const lt_lion &, int64_t tensor, int64_t lo, int64_t hi);
    void (*adagrad)(const lt_tensors &, const lt_adagrad &, int64_t tensor, int64_t lo, int64_t hi);
    void (*sgd)(const lt_tensors &, const lt_sgd &, int64_t tensor, int64_t lo, int64_t hi);
    void (*lamb_update)(const lt_tensors &, const lt_lamb &, int64_t tensor, int64_t lo, int64_t hi, double *norms);
    void (*lamb_apply)(const lt_tensors &, const lt_lamb &, float step, int64_t tensor, int64_t lo, int64_t hi);
    double (*norm_squared)(const void *data, int dtype, int64_t lo, int64_t hi);
    void (*accumulate)(const lt_pairs &, int64_t tensor, int64_t lo, int64_t hi);
    void (*cast_scale)(const lt_pairs &, int64_t tensor, int64_t lo, int64_t hi);
    // Of a flat tensor; `lo` is a multiple of the block.
    void (*encode_blocks)(const lt_blocks &, const void *x, float *residual, uint8_t *out, int64_t lo, int64_t hi);
    void (*decode_blocks)(const lt_blocks &, int64_t count, const uint8_t *const *in, float factor, void *out,
                          int64_t lo, int64_t hi);
    // Of magnitudes as integers: the upper 16 bits (bins[65536]), the lower 15 of those with these upper bits
    // (bins[32768]); how many are above and equal to a threshold; where those are, with the first `ties` equal ones.
    void (*upper_histogram)(const float *c, int64_t lo, int64_t hi, uint32_t *bins);
    void (*lower_histogram)(const float *c, int64_t lo, int64_t hi, int32_t upper, uint32_t *bins);
    void (*count_from)(const float *c, int64_t lo, int64_t hi, int32_t threshold, int64_t *above, int64_t *equal);
    void (*indices_from)(const float *c, int64_t lo, int64_t hi, int32_t threshold, int64_t ties, int32_t *indices);
    AttentionKernels attention;
    void (*round_stochastic)(const lt_rounding &, int64_t lo, int64_t hi);
};

extern const Kernels lt_kernels_avx512, lt_kernels_avx2, lt_kernels_neon, lt_kernels_portable;
extern const int64_t lt_prefetch_ahead;  // bytes between what a kernel reads and what it asks for
extern const AttentionKernels lt_attention_amx;  // empty where the compiler does not know the instructions
