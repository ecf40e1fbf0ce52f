// The C ABI of the native kernels: no torch types, so that one library serves every torch version.
//
// Every function works on lists of tensors that share one set of options: arrays of `count` pointers and sizes. Pointers
// need the alignment of their element type only. Every function returns 0, or an error code that lt_*_error explains.
// Arithmetic is fp32 in a fixed order of correctly rounded operations (fused multiply-adds where written), the same on
// the CPU, on CUDA and in the torch references (lt_zero/ops): results are equal to the last bit; only attention differs.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LT_ABI_VERSION 1

enum lt_dtype { LT_FP32 = 0, LT_BF16 = 1, LT_FP16 = 2, LT_CODES = 3 };  // LT_CODES: of states, lt_zero/kernels/moments.py

enum lt_error { LT_OK = 0, LT_BAD_ARGUMENT = 1, LT_OUT_OF_MEMORY = 2, LT_CORRUPT = 3 };
#define LT_CUDA_ERROR 1000  // CUDA's own codes are added to it

// Where consecutive elements of a tensor are in their parameter, and what their random bits are made of. They are rows of
// the whole parameter; lt_zero/kernels/rounding.py describes both. All numbers have 64 bits: an array of these is a matrix.
typedef struct {
    int64_t tensor, begin;      // the first element, in a list of tensors; the next place follows the last one
    int64_t first, row, stride; // index of the first element; elements of a row; from one row to the next
    uint64_t seed;              // of the parameter
    uint64_t step;
} lt_place;

// What every optimizer step has. Unused arrays are NULL.
typedef struct {
    int64_t count;              // tensors
    const int64_t *numel;       // [count] elements
    void *const *param;         // [count] master weights, updated
    const void *const *grad;    // [count] read only
    void *const *state1;        // [count] first optimizer state, updated
    void *const *state2;        // [count] second optimizer state, updated
    void *const *out;           // [count] low-precision copies of the updated weights, or NULL
    int32_t param_dtype;        // LT_FP32 or LT_BF16, to which the updated weights are rounded; then out is LT_BF16, too
    int32_t grad_dtype;         // lt_dtype
    int32_t state_dtype;        // LT_FP32 or LT_BF16; of adam_step also LT_CODES
    int32_t out_dtype;          // lt_dtype; ignored without out
    int32_t maximize;           // the gradient's sign is flipped
    const float *scale;         // gradients are multiplied by *scale * *clip; NULL counts as 1
    const float *clip;
    const float *found_inf;     // if not NULL and *found_inf != 0, nothing is written
    const float *levels;        // of LT_CODES: the numbers of lt_zero/kernels/moments.py, on the device
    const lt_place *places;     // [place_count] of all elements, in their order, on the device: weights in LT_BF16 are
                                // rounded up or down at random. NULL: to the nearest
    int64_t place_count;
} lt_tensors;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double step;                // this step's number, from 1
    int32_t decoupled;          // weight decay of AdamW (arXiv:1711.05101) instead of an L2 term in the gradient
} lt_adam;

typedef struct {
    double lr, beta1, beta2, weight_decay;
} lt_lion;

typedef struct {
    double lr;                  // after lr_decay
    double eps, weight_decay;
} lt_adagrad;

typedef struct {
    double lr, momentum, dampening, weight_decay;
    int32_t nesterov;
    int32_t first;              // momentum buffers have no values yet
} lt_sgd;

typedef struct {
    double beta1, beta2, eps, weight_decay;
} lt_lamb;

// A list of tensors with a dtype each.
typedef struct {
    int64_t count;
    const int64_t *numel;
    const void *const *data;
    const int32_t *dtype;
} lt_mixed;

// dst <- src elementwise.
typedef struct {
    int64_t count;
    const int64_t *numel;
    void *const *dst;
    const void *const *src;
    int32_t dst_dtype, src_dtype;
    double factor;              // src is multiplied by (float)factor * *scale
    const float *scale;         // or NULL
} lt_pairs;

// fp32 to bf16, rounded up or down at random; lt_zero/kernels/rounding.py describes it.
typedef struct {
    int64_t numel;
    lt_place place;             // of all elements
    const float *counter;       // where the elements are: the step, instead of that of the place; or NULL
    const float *src;
    void *dst;
} lt_rounding;

// Flat tensors of `numel` elements, one row behind the other, in blocks with a scale each. Each row has a buffer of its
// own, and these follow each other, too; lt_zero/kernels/blocks.py describes them.
typedef struct {
    int64_t rows;               // up to 65535
    int64_t numel;              // of a row
    int64_t residual_row;       // elements from the first of a row's residual to that of the next
    int64_t block;              // elements, a multiple of 16 up to 65536
    int32_t bits;               // of an element: 8, 4, 2 or 1
    int32_t dtype;              // lt_dtype of x, or of what is decoded
    int32_t normal;             // of 4 bits: levels of NormalFloat (lt_zero/features/quantize/nf4.py) instead of uniform ones
} lt_blocks;

// A tensor [batch, heads, length, dim] whose last dimension is contiguous; strides in elements.
typedef struct {
    void *data;
    int64_t batch, head, row;
} lt_rows;

// Which blocks of scores are computed: for each layout and block of rows (or columns) the blocks in it, rising.
typedef struct {
    const int64_t *begin;       // [layouts * blocks + 1]: where they start in `index`
    const int32_t *index;
} lt_lists;

// softmax(scale * q k^T + key_bias) v on the blocks of a layout; lt_zero/features/sparse_attention/kernel.py describes it.
typedef struct {
    int64_t batch, heads, kv_heads, length, dim;
    int64_t block;              // rows and columns of a block; the last one may be cut by `length`
    int64_t layouts;            // 1 or heads
    lt_lists rows, columns;     // blocks of columns for each block of rows, and the reverse
    lt_rows q, k, v, out, dout, dq, dk, dv;  // heads, kv_heads for k, v, dk and dv; forward: up to `out`
    float *lse;                 // [batch, heads, length] logarithm of the sum of exponentials; -infinity without any
    const float *key_bias;      // [batch, length] or NULL
    double scale, dropout;
    uint64_t seed;
    int32_t dtype;              // LT_FP32 or LT_BF16, of all tensors
    int32_t causal;             // keys after a row are not seen
} lt_attention;

// ---- CPU: `threads` at most; the calling thread is one of them -------------------------------------------------

int lt_cpu_abi(void);
const char *lt_cpu_isa(void);       // "amx", "avx512", "avx2", "neon" or "portable": what run-time dispatch chose
const char *lt_cpu_pool(void);      // whose threads: "openmp" (the OpenMP that the process has loaded) or "own"
int lt_cpu_use_isa(const char *);   // choose one (NULL: the best); LT_BAD_ARGUMENT if this CPU cannot run it
const char *lt_cpu_error(int code);

int lt_cpu_adam_step(const lt_tensors *, const lt_adam *, int threads);
int lt_cpu_lion_step(const lt_tensors *, const lt_lion *, int threads);
int lt_cpu_adagrad_step(const lt_tensors *, const lt_adagrad *, int threads);
int lt_cpu_sgd_step(const lt_tensors *, const lt_sgd *, int threads);  // state1 may be NULL: no momentum
// First pass: the moments, and norms[i] = {sum param^2, sum update^2} of update = state1 / (sqrt(state2) + eps) +
// weight_decay * param. Weights are only read.
int lt_cpu_lamb_update(const lt_tensors *, const lt_lamb *, double *norms, int threads);
// Second pass: param[i] -= rate[i] * update, computed again: cheaper than memory for it. `grad` is not read.
int lt_cpu_lamb_apply(const lt_tensors *, const lt_lamb *, const float *rate, int threads);
int lt_cpu_norm_squared(const lt_mixed *, double *result, int threads);  // added up in fp64, in an order of its own
int lt_cpu_accumulate(const lt_pairs *, int threads);  // dst += factor * src, dst in fp32
int lt_cpu_cast_scale(const lt_pairs *, int threads);  // dst = factor * src, rounded once
int lt_cpu_round_stochastic(const lt_rounding *, int threads);

// out = codes and scales of x + residual; residual (fp32, or NULL) = what they do not represent.
int lt_cpu_encode_blocks(const lt_blocks *, const void *x, float *residual, void *out, int threads);
// out = (float)factor * sum of the `count` decoded buffers, in their order; of one buffer's rows if there are several
int lt_cpu_decode_blocks(const lt_blocks *, int64_t count, const void *const *buffers, double factor, void *out,
                         int threads);

// indices[k] = where the k largest magnitudes of c are, in rising order; NaN is largest, of equals the first ones count.
int lt_cpu_select_topk(const float *c, int64_t numel, int64_t k, int32_t *indices, int threads);

// fp32 sums in an order that depends on the instruction set, not on the number of threads.
int lt_cpu_attention_forward(const lt_attention *, int threads);   // writes out and lse
int lt_cpu_attention_backward(const lt_attention *, int threads);  // writes dq, dk and dv

// Bytes in, bytes out, on the calling thread. `out` has room for n + 9 bytes; *used of them are written.
int lt_cpu_huffman_encode(const uint8_t *in, int64_t n, uint8_t *out, int64_t *used);
int64_t lt_cpu_huffman_size(const uint8_t *in, int64_t nbytes);  // the bytes before coding, unchecked; -1: no header
int lt_cpu_huffman_decode(const uint8_t *in, int64_t nbytes, uint8_t *out, int64_t n);  // LT_CORRUPT unless it has n

// ---- CUDA: pointers to elements, scale, clip, found_inf, rate, norms and result are device memory ---------------
// Arrays of pointers and sizes are host memory and may be freed after the call. `scratch` is device memory of
// lt_cuda_scratch(count, numel) bytes, aligned to 16; so are buffers of blocks. Nothing synchronises.

#define LT_CUDA_BUFFERS 256

int lt_cuda_abi(void);
const char *lt_cuda_error(int code);
int64_t lt_cuda_scratch(int64_t count, const int64_t *numel);

int lt_cuda_adam_step(const lt_tensors *, const lt_adam *, void *stream);
int lt_cuda_lion_step(const lt_tensors *, const lt_lion *, void *stream);
int lt_cuda_adagrad_step(const lt_tensors *, const lt_adagrad *, void *stream);
int lt_cuda_sgd_step(const lt_tensors *, const lt_sgd *, void *stream);
int lt_cuda_lamb_update(const lt_tensors *, const lt_lamb *, double *norms, void *scratch, void *stream);
int lt_cuda_lamb_apply(const lt_tensors *, const lt_lamb *, const float *rate, void *stream);
int lt_cuda_norm_squared(const lt_mixed *, double *result, void *scratch, void *stream);
int lt_cuda_encode_blocks(const lt_blocks *, const void *x, float *residual, void *out, void *stream);
int lt_cuda_decode_blocks(const lt_blocks *, int64_t count, const void *const *buffers, double factor, void *out,
                          void *stream);  // with more buffers than LT_CUDA_BUFFERS, out is fp32
int64_t lt_cuda_topk_scratch(int64_t numel);
int lt_cuda_select_topk(const float *c, int64_t numel, int64_t k, int32_t *indices, void *scratch, void *stream);
int lt_cuda_accumulate(const lt_pairs *, void *stream);
int lt_cuda_cast_scale(const lt_pairs *, void *stream);
int lt_cuda_round_stochastic(const lt_rounding *, void *stream);
// dst (fp32) = src (16-bit) where dst, rounded, differs from it. The factor and scale of pairs are not used.
int lt_cuda_take_edits(const lt_pairs *, void *stream);

#ifdef __cplusplus
}
#endif
