// Lion, Adagrad and SGD on CUDA: the rules with one state or none.
#include "step.cuh"

using namespace lt_cuda;

LT_EXPORT int lt_cuda_lion_step(const lt_tensors *tensors, const lt_lion *options, void *stream) {
    if (!options) return LT_BAD_ARGUMENT;
    return run_step(tensors, make_rule(*options), stream);
}

LT_EXPORT int lt_cuda_adagrad_step(const lt_tensors *tensors, const lt_adagrad *options, void *stream) {
    if (!options) return LT_BAD_ARGUMENT;
    return run_step(tensors, make_rule(*options), stream);
}

LT_EXPORT int lt_cuda_sgd_step(const lt_tensors *tensors, const lt_sgd *options, void *stream) {
    if (!options) return LT_BAD_ARGUMENT;
    SgdRule rule = make_rule(*options);
    return run_step(tensors, rule, stream, rule.has_momentum ? 1 : 0);
}
