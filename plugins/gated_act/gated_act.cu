#include "../common/activation.cuh"
#include "../common/flat.cuh"
#include "gated_act.h"

namespace trtfuse {
namespace {

// y = act(gate) * up
template <typename T>
struct GatedAct {
    static constexpr int N = kWindow<T>;
    using More = Pack;

    const T* up;
    Activation activation;
    float alpha;

    __device__ Pack read(int64_t element, int left) const { return load<false, true>(up + element, 0, left); }

    __device__ void apply(float (&values)[N], const Pack& more) const {
        float factor[N];
        widen<T>(more, factor);
        activate<T>(values, activation, alpha);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] *= factor[k];
    }
};

}  // namespace

cudaError_t gated_act(const GatedActCall& call) {
    if (call.elements == 0) return cudaSuccess;
    if (call.elements < 0) return cudaErrorInvalidValue;
    return by_type(call.type, [&](auto zero) {
        using T = decltype(zero);
        const GatedAct<T> function{static_cast<const T*>(call.up), call.activation, call.alpha};
        return flat(static_cast<const T*>(call.gate), static_cast<T*>(call.y), call.elements, function,
                    call.stream);
    });
}

}  // namespace trtfuse
