// Adam and AdamW on CUDA. The rules are spread over files because kernels for all dtypes take seconds to compile, and
// files compile in parallel.
#include "step.cuh"

using namespace lt_cuda;

LT_EXPORT int lt_cuda_adam_step(const lt_tensors *tensors, const lt_adam *options, void *stream) {
    if (!options) return LT_BAD_ARGUMENT;
    return run_step(tensors, make_rule(*options), stream);
}
