// Runs a grid of CUDA threads on the CPU, and finds races for shared memory.
//
// Note [Races]
//     The sources are compiled with -fsanitize=thread and linked without its runtime: this file has the functions that
//     the compiler calls before each access. Shared memory is static, so what lies in the library's .bss is shared
//     memory (or threadIdx and the like, which kernels only read). Two threads of a block that access a byte with no
//     barrier between them race if one of them writes, unless both are atomic. Whoever came first, every such pair is
//     seen: between two barriers every thread runs to the end. Shuffles order nothing, as in CUDA.
#include "cuda_runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" {
extern char __attribute__((visibility("hidden"))) __ehdr_start[], __bss_start[], _end[];
}

dim3 threadIdx(0, 0), blockIdx(0, 0), blockDim, gridDim;

namespace emulation {

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
};

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

enum Kind { READ, WRITE, ATOMIC, KINDS };

struct Access {
    uint64_t epoch = 0;
    unsigned thread;
    const char *code;
};

// Of one byte: two accesses of each kind by different threads are enough to show a race with any third.
struct Byte {
    Access latest[KINDS][2];
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::function<void()> kernel;
static Barrier block_barrier, warp_barriers[32];
static uint64_t lanes[1024], epoch = 0;  // an epoch lies between two barriers of a block
static int processors = 1;
static bool running = false;  // a kernel, rather than the host's code, which is compiled the same way
static std::vector<Byte> shared;
static std::set<std::pair<uint64_t, uint64_t>> races;  // addresses of code
static std::pair<std::string, int> left_out;           // a barrier that threads run through

static void record(const void *address, size_t size, Kind kind, const void *code) {
    if (!running || address < (void *)__bss_start || address >= (void *)_end) return;
    for (size_t at = (size_t)((char *)address - __bss_start), end = at + size; at < end; ++at) {
        Byte &byte = shared[at];
        for (int other = 0; other < KINDS; ++other)
            for (const Access &access : byte.latest[other])
                if (access.epoch == epoch && access.thread != threadIdx.x && (kind != READ || other != READ) &&
                    (kind != ATOMIC || other != ATOMIC))
                    races.insert({access.code - __ehdr_start, (char *)code - __ehdr_start});
        Access *own = byte.latest[kind];
        if (own[0].epoch == epoch && own[0].thread != threadIdx.x) ++own;
        *own = {epoch, threadIdx.x, (char *)code};
    }
}

static void wait(Barrier &barrier, unsigned threads) {
    unsigned generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
        epoch += &barrier == &block_barrier;
    }
    do swapcontext(&fibers[threadIdx.x].context, &scheduler);
    while (barrier.generation == generation);
}

void meet(const char *file, int line) {
    std::string path = file;
    if (left_out.second != line || path.substr(path.rfind('/') + 1) != left_out.first) wait(block_barrier, blockDim.x);
}

uint64_t exchange(uint64_t bits, unsigned from) {
    Barrier &warp = warp_barriers[threadIdx.x / 32];
    lanes[threadIdx.x] = bits;
    wait(warp, 32);
    uint64_t result = lanes[from];
    wait(warp, 32);
    return result;
}

uint32_t atomic_add(uint32_t *address, uint32_t value) {
    record(address, sizeof *address, ATOMIC, __builtin_return_address(0));
    uint32_t old = *address;
    *address += value;
    return old;
}

int count_of_processors() { return processors; }

static void run_fiber() {
    kernel();
    fibers[threadIdx.x].done = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

static void run_block(unsigned threads) {
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
    ++epoch;
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

void run_grid(dim3 grid, dim3 block, std::function<void()> body) {
    // What a kernel wrote after a race may be places that the next one writes to.
    if (!races.empty()) return;
    shared.resize((size_t)(_end - __bss_start));
    gridDim = grid;
    blockDim = block;
    kernel = body;
    running = true;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(blockDim.x);
    running = false;
}

}  // namespace emulation

// ---- For tests ------------------------------------------------------------------------------------------------------

using namespace emulation;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Results must not depend on the GPU's size.
EXPORT void emulation_processors(int count) { processors = count; }

// Leave out the barrier in this line; "" for none.
EXPORT void emulation_leave_out(const char *file, int line) { left_out = {file, line}; }

// The next race that was found, as two places in the library's code; 0 if there is none.
EXPORT int emulation_race(uint64_t *places) {
    if (races.empty()) return 0;
    places[0] = races.begin()->first;
    places[1] = races.begin()->second;
    races.erase(races.begin());
    return 1;
}

// ---- What -fsanitize=thread calls ------------------------------------------------------------------------------------

#define ACCESSES(size)                                                                                               \
    EXPORT void __tsan_read##size(void *p) { record(p, size, READ, __builtin_return_address(0)); }                   \
    EXPORT void __tsan_write##size(void *p) { record(p, size, WRITE, __builtin_return_address(0)); }                 \
    EXPORT void __tsan_unaligned_read##size(void *p) { record(p, size, READ, __builtin_return_address(0)); }         \
    EXPORT void __tsan_unaligned_write##size(void *p) { record(p, size, WRITE, __builtin_return_address(0)); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
EXPORT void __tsan_read_range(void *p, size_t size) { record(p, size, READ, __builtin_return_address(0)); }
EXPORT void __tsan_write_range(void *p, size_t size) { record(p, size, WRITE, __builtin_return_address(0)); }
EXPORT void __tsan_func_entry(void *) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_init() {}
EXPORT void __tsan_vptr_update(void **, void *) {}
EXPORT void __tsan_vptr_read(void **) {}
