#include "../common/activation.cuh"
#include "../common/flat.cuh"
#include "bias_act.h"

namespace trtfuse {
namespace {

// y = act(x + bias)
template <typename T>
struct BiasAct {
    static constexpr int N = kWindow<T>;

    struct More {
        float bias[N];
    };

    const T* bias;  // may be null
    int64_t columns;
    FastModulo modulo;
    bool is_scalar, is_small;  // is_small: every element's number is below 2^31
    Activation activation;
    float alpha;

    __device__ More read(int64_t element, int) const {
        More more{};
        if (!bias) return more;
        if (is_scalar) {
            const float value = widen_one(bias);
#pragma unroll
            for (int k = 0; k < N; ++k) more.bias[k] = value;
            return more;
        }
        int column = is_small ? static_cast<int>(modulo(static_cast<uint32_t>(element)))
                              : static_cast<int>(element % columns);
        if (columns - column >= N) {
            widen<T>(load<false>(bias + column, 0, N), more.bias);
            return more;
        }
        for (int k = 0; k < N; ++k) {  // the window goes over the end of a row
            more.bias[k] = widen_one(bias + column);
            if (++column == columns) column = 0;
        }
        return more;
    }

    __device__ void apply(float (&values)[N], const More& more) const {
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] += more.bias[k];
        activate<T>(values, activation, alpha);
    }
};

}  // namespace

cudaError_t bias_act(const BiasActCall& call) {
    const int64_t elements = call.rows * call.columns;
    if (elements == 0) return cudaSuccess;
    if (elements < 0 || call.columns > kMostColumns) return cudaErrorInvalidValue;
    return by_type(call.type, [&](auto zero) {
        using T = decltype(zero);
        BiasAct<T> function{};
        function.bias = static_cast<const T*>(call.bias);
        function.columns = call.columns;
        function.modulo = FastModulo(static_cast<uint32_t>(call.columns));
        function.is_scalar = call.bias_is_scalar;
        function.is_small = elements <= INT32_MAX;
        function.activation = call.activation;
        function.alpha = call.alpha;
        return flat(static_cast<const T*>(call.x), static_cast<T*>(call.y), elements, function, call.stream);
    });
}

}  // namespace trtfuse
