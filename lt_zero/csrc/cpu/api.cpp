// The C ABI on the CPU: which instruction set, which thread does what.
//
// Note [Blocks] A list of tensors is cut into blocks of BLOCK elements that never cross tensors. Threads take the next
// block from a counter until none is left, so a thread that the system holds up delays nobody. Sums are kept per block
// and added in the order of the blocks: no result depends on the number of threads.
//
// Note [Whose threads] torch has loaded an OpenMP runtime, whose threads spin for a while after each of torch's
// operations. Threads of our own would compete with them, so the region runs on that runtime, through the one entry
// point that every OpenMP program on Linux uses; no OpenMP is needed to compile. Where there is none, own threads are
// started per call.

#include <dlfcn.h>

#include <string>
#include <thread>

#include "cpu/parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Measured with AdamW, in percent of the time of torch's. Zen 4: 256 to 512 bytes 92 to 95, none 96 to 98, 1024 to 8192
// 105 to 115. Xeon (Ice Lake and later): 2048 is best, 1024 and 4096 take a few percent longer.
const int64_t lt_prefetch_ahead = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) return 384;
#endif
    return 2048;
}();

namespace {

// ---- instruction sets --------------------------------------------------------------------------------------------

#if defined(__x86_64__)
// Linux wants to be asked before a process uses tiles, once for all of its threads.
bool tiles() {
    constexpr unsigned AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24;
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!lt_attention_amx.forward || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & AMX_BF16) && (d & AMX_TILE) && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// What has no need of tiles is that of AVX-512.
const Kernels *amx() {
    static const Kernels kernels = [] {
        Kernels k = lt_kernels_avx512;
        k.isa = "amx";
        k.attention = lt_attention_amx;
        return k;
    }();
    return &kernels;
}
#endif

bool runs(const std::string &isa) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    __builtin_cpu_init();
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == "avx2") return avx2;
    if (isa == "amx") return runs("avx512") && tiles();
    if (isa == "avx512")
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    if (isa == "neon") return true;
#endif
    return isa == "portable";
}

const Kernels *find(const char *wanted) {
    static const Kernels *const all[] = {
#if defined(__x86_64__)
        amx(), &lt_kernels_avx512, &lt_kernels_avx2,
#elif defined(__aarch64__)
        &lt_kernels_neon,
#endif
        &lt_kernels_portable};
    for (const Kernels *kernels : all)
        if ((!wanted || std::string(wanted) == kernels->isa) && runs(kernels->isa)) return kernels;
    return nullptr;
}

std::atomic<const Kernels *> chosen{nullptr};

// ---- threads -----------------------------------------------------------------------------------------------------

typedef void (*Region)(void *);
typedef void (*OpenMP)(Region, void *, unsigned threads, unsigned flags);

OpenMP openmp() {
    static OpenMP entry = (OpenMP)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return entry;
}

}  // namespace

const Kernels &lt_kernels() {
    const Kernels *k = chosen.load();
    if (!k) chosen.store(k = find(nullptr));
    return *k;
}

void lt_parallel(int threads, Region region, void *data) {
    if (threads <= 1) return region(data);
    if (openmp()) return openmp()(region, data, (unsigned)threads, 0);
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads; i++) others.emplace_back(region, data);
    } catch (const std::exception &) {
        // The system gives no more threads; those that run, and this one, take all blocks.
    }
    region(data);
    for (std::thread &thread : others) thread.join();
}

namespace {

struct Block {
    int64_t tensor, lo, hi;
};

std::vector<Block> blocks_of(int64_t count, const int64_t *numel, int64_t *total) {
    std::vector<Block> blocks;
    *total = 0;
    for (int64_t k = 0; k < count; k++) {
        *total += numel[k];
        for (int64_t lo = 0; lo < numel[k]; lo += BLOCK) blocks.push_back({k, lo, std::min(lo + BLOCK, numel[k])});
    }
    return blocks;
}

// Calls work(index, block) for each block, on several threads. See Note [Blocks].
template <class Work>
void for_each_block(const std::vector<Block> &blocks, int64_t total, int threads, Work work) {
    for_each_index(blocks.size(), total <= SMALL ? 1 : threads, [&](size_t i) { work(i, blocks[i]); });
}

// ---- checks ------------------------------------------------------------------------------------------------------

bool sizes_ok(int64_t count, const int64_t *numel) {
    if (count < 0 || (count > 0 && !numel)) return false;
    for (int64_t k = 0; k < count; k++)
        if (numel[k] < 0) return false;
    return true;
}

bool place_ok(const lt_place &place) { return place.row >= 1 && place.first >= 0 && place.stride >= 0; }

// A place for each element, in order.
bool places_ok(const lt_tensors *t) {
    int64_t at = 0;
    for (int64_t k = 0; k < t->count; k++) {
        int64_t end = 0;  // of the elements that have one
        for (; at < t->place_count && t->places[at].tensor == k; at++) {
            const lt_place &place = t->places[at];
            if (!place_ok(place) || (end == 0 ? place.begin != 0 : place.begin < end)) return false;
            end = place.begin + 1;
        }
        if (t->numel[k] > 0 && end == 0) return false;
    }
    return at == t->place_count;
}

// Master weights, and how they are rounded.
bool params_ok(const lt_tensors *t) {
    if (t->param_dtype == LT_FP32) return !t->places;
    return t->param_dtype == LT_BF16 && (!t->out || t->out_dtype == LT_BF16) && (!t->places || places_ok(t));
}

bool tensors_ok(const lt_tensors *t, int states) {
    return t && sizes_ok(t->count, t->numel) && params_ok(t) && (t->count == 0 || (t->param && t->grad)) && is_dtype(t->grad_dtype) &&
           (t->state_dtype == LT_FP32 || t->state_dtype == LT_BF16) && (!t->out || is_dtype(t->out_dtype)) &&
           (t->count == 0 || states < 1 || t->state1) && (t->count == 0 || states < 2 || t->state2);
}

// Moments in 8 bits: `t` is a copy that names another dtype, for the other checks.
bool codes_ok(const lt_tensors *t) {
    if (!t || t->state_dtype != LT_CODES || !t->levels) return false;
    lt_tensors others = *t;
    others.state_dtype = LT_FP32;
    return tensors_ok(&others, 2);
}

bool pairs_ok(const lt_pairs *t) {
    return t && sizes_ok(t->count, t->numel) && (t->count == 0 || (t->dst && t->src)) && is_dtype(t->dst_dtype) &&
           is_dtype(t->src_dtype);
}

// One pass over a list, without results but what is written.
template <class List, class Work>
int sweep(const List &list, int threads, Work work) {
    return guarded([&] {
        int64_t total;
        const std::vector<Block> blocks = blocks_of(list.count, list.numel, &total);
        for_each_block(blocks, total, threads, [&](size_t, const Block &b) { work(b); });
    });
}

template <class Options>
int step(const lt_tensors *t, const Options *o, int states, int threads,
         void (*kernel)(const lt_tensors &, const Options &, int64_t, int64_t, int64_t), bool takes_codes = false) {
    if (!o || !(tensors_ok(t, states) || (takes_codes && codes_ok(t)))) return LT_BAD_ARGUMENT;
    if (t->found_inf && *t->found_inf != 0.0f) return LT_OK;
    return sweep(*t, threads, [&](const Block &b) { kernel(*t, *o, b.tensor, b.lo, b.hi); });
}

}  // namespace

LT_API int lt_cpu_abi(void) { return LT_ABI_VERSION; }
LT_API const char *lt_cpu_isa(void) { return lt_kernels().isa; }
LT_API const char *lt_cpu_pool(void) { return openmp() ? "openmp" : "own"; }

LT_API int lt_cpu_use_isa(const char *isa) {
    const Kernels *k = find(isa);
    if (k) chosen.store(k);
    return k ? LT_OK : LT_BAD_ARGUMENT;
}

LT_API const char *lt_cpu_error(int code) {
    switch (code) {
        case LT_OK: return "no error";
        case LT_BAD_ARGUMENT: return "bad argument: a missing array, a negative size or an unknown dtype";
        case LT_OUT_OF_MEMORY: return "out of host memory";
        case LT_CORRUPT: return "corrupt data";
        default: return "unknown error";
    }
}

LT_API int lt_cpu_adam_step(const lt_tensors *t, const lt_adam *o, int threads) {
    return step(t, o, 2, threads, lt_kernels().adam, true);
}

LT_API int lt_cpu_lion_step(const lt_tensors *t, const lt_lion *o, int threads) {
    return step(t, o, 1, threads, lt_kernels().lion);
}

LT_API int lt_cpu_adagrad_step(const lt_tensors *t, const lt_adagrad *o, int threads) {
    return step(t, o, 1, threads, lt_kernels().adagrad);
}

LT_API int lt_cpu_sgd_step(const lt_tensors *t, const lt_sgd *o, int threads) {
    return step(t, o, o && o->momentum != 0.0 ? 1 : 0, threads, lt_kernels().sgd);
}

LT_API int lt_cpu_lamb_update(const lt_tensors *t, const lt_lamb *o, double *norms, int threads) {
    if (!o || !tensors_ok(t, 2) || (t->count > 0 && !norms)) return LT_BAD_ARGUMENT;
    return guarded([&] {
        for (int64_t i = 0; i < 2 * t->count; i++) norms[i] = 0.0;
        if (t->found_inf && *t->found_inf != 0.0f) return;
        int64_t total;
        const std::vector<Block> blocks = blocks_of(t->count, t->numel, &total);
        std::vector<double> parts(2 * blocks.size());
        for_each_block(blocks, total, threads, [&](size_t i, const Block &b) {
            lt_kernels().lamb_update(*t, *o, b.tensor, b.lo, b.hi, &parts[2 * i]);
        });
        for (size_t i = 0; i < parts.size(); i++) norms[2 * blocks[i / 2].tensor + (int64_t)(i % 2)] += parts[i];
    });
}

LT_API int lt_cpu_lamb_apply(const lt_tensors *t, const lt_lamb *o, const float *rate, int threads) {
    if (!o || !tensors_ok(t, 2) || (t->count > 0 && !rate)) return LT_BAD_ARGUMENT;
    if (t->found_inf && *t->found_inf != 0.0f) return LT_OK;
    return sweep(*t, threads, [&](const Block &b) {
        lt_kernels().lamb_apply(*t, *o, -rate[b.tensor], b.tensor, b.lo, b.hi);
    });
}

LT_API int lt_cpu_norm_squared(const lt_mixed *t, double *result, int threads) {
    if (!t || !result || !sizes_ok(t->count, t->numel) || (t->count > 0 && (!t->data || !t->dtype)))
        return LT_BAD_ARGUMENT;
    for (int64_t k = 0; k < t->count; k++)
        if (!is_dtype(t->dtype[k])) return LT_BAD_ARGUMENT;
    return guarded([&] {
        int64_t total;
        const std::vector<Block> blocks = blocks_of(t->count, t->numel, &total);
        std::vector<double> parts(blocks.size());
        for_each_block(blocks, total, threads, [&](size_t i, const Block &b) {
            parts[i] = lt_kernels().norm_squared(t->data[b.tensor], t->dtype[b.tensor], b.lo, b.hi);
        });
        *result = 0.0;
        for (double part : parts) *result += part;
    });
}

LT_API int lt_cpu_accumulate(const lt_pairs *t, int threads) {
    if (!pairs_ok(t) || t->dst_dtype != LT_FP32) return LT_BAD_ARGUMENT;
    return sweep(*t, threads, [&](const Block &b) { lt_kernels().accumulate(*t, b.tensor, b.lo, b.hi); });
}

LT_API int lt_cpu_cast_scale(const lt_pairs *t, int threads) {
    if (!pairs_ok(t)) return LT_BAD_ARGUMENT;
    return sweep(*t, threads, [&](const Block &b) { lt_kernels().cast_scale(*t, b.tensor, b.lo, b.hi); });
}

LT_API int lt_cpu_round_stochastic(const lt_rounding *t, int threads) {
    if (!t || t->numel < 0) return LT_BAD_ARGUMENT;
    if (t->numel == 0) return LT_OK;
    if (!t->src || !t->dst || !place_ok(t->place) || t->numel % t->place.row) return LT_BAD_ARGUMENT;
    lt_rounding rounding = *t;
    if (t->counter) rounding.place.step = (uint64_t)*t->counter;
    const size_t blocks = (size_t)((t->numel + BLOCK - 1) / BLOCK);
    for_each_index(blocks, t->numel <= SMALL ? 1 : threads, [&](size_t i) {
        const int64_t lo = (int64_t)i * BLOCK;
        lt_kernels().round_stochastic(rounding, lo, std::min(lo + BLOCK, t->numel));
    });
    return LT_OK;
}
