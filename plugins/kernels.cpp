// The kernels for callers without TensorRT: raw device pointers, sizes and a stream, by ctypes or dlopen. The
// kernels' tests and benchmarks come in here. Each returns a cudaError_t, 0 for success.
#include <cuda_runtime_api.h>

#include "bias_act/bias_act.h"
#include "common/export.h"
#include "gated_act/gated_act.h"
#include "layer_norm/layer_norm.h"
#include "rms_norm/rms_norm.h"
#include "softmax/softmax.h"

using namespace trtfuse;

extern "C" {

/// type: 0 fp32, 1 fp16, 2 bf16. activation: its place in kActivationNames.
TRTFUSE_EXPORT int trtfuse_test_bias_act(int type, int activation, float alpha, const void* x,
                                         const void* bias, void* y, int64_t rows, int64_t columns,
                                         int bias_is_scalar, void* stream) {
    return bias_act({static_cast<Type>(type), static_cast<Activation>(activation), alpha, x, bias, y, rows,
                     columns, bias_is_scalar != 0, static_cast<cudaStream_t>(stream)});
}

TRTFUSE_EXPORT int trtfuse_test_gated_act(int type, int activation, float alpha, const void* gate,
                                          const void* up, void* y, int64_t elements, void* stream) {
    return gated_act({static_cast<Type>(type), static_cast<Activation>(activation), alpha, gate, up, y,
                      elements, static_cast<cudaStream_t>(stream)});
}

TRTFUSE_EXPORT int trtfuse_test_layer_norm(int type, const void* x, const void* skip, const void* preset,
                                           const void* scale, const void* bias, void* y, void* sum,
                                           int64_t rows, int64_t columns, float epsilon, int preset_is_scalar,
                                           void* stream) {
    return layer_norm({static_cast<Type>(type), x, skip, preset, scale, bias, y, sum, rows, columns, epsilon,
                       preset_is_scalar != 0, static_cast<cudaStream_t>(stream)});
}

TRTFUSE_EXPORT int trtfuse_test_rms_norm(int type, const void* x, const void* skip, const void* preset,
                                         const void* scale, void* y, void* sum, int64_t rows, int64_t columns,
                                         float epsilon, int preset_is_scalar, void* stream) {
    return rms_norm({static_cast<Type>(type), x, skip, preset, scale, nullptr, y, sum, rows, columns, epsilon,
                     preset_is_scalar != 0, static_cast<cudaStream_t>(stream)});
}

/// full, own: shapes of x and of mask or condition (`own_rank` 0 with neither). condition_bytes: 1 bool, 4
/// int32.
TRTFUSE_EXPORT int trtfuse_test_softmax(int type, const void* x, const void* mask, const void* condition,
                                        int condition_bytes, void* y, const int64_t* full, int full_rank,
                                        const int64_t* own, int own_rank, float scale, float fill, int keep,
                                        void* stream) {
    SoftmaxCall call{};
    call.type = static_cast<Type>(type);
    call.x = x, call.mask = mask, call.condition = condition, call.condition_bytes = condition_bytes,
    call.y = y;
    call.scale = scale, call.fill = fill, call.keep = keep != 0,
    call.stream = static_cast<cudaStream_t>(stream);
    call.columns = full[full_rank - 1], call.rows = 1;
    for (int i = 0; i + 1 < full_rank; ++i) call.rows *= full[i];
    if (!broadcast(own, own_rank, full, full_rank, call.where)) return cudaErrorInvalidValue;
    return softmax(call);
}

TRTFUSE_EXPORT const char* trtfuse_error(int status) {
    return cudaGetErrorString(static_cast<cudaError_t>(status));
}

TRTFUSE_EXPORT const char* trtfuse_architectures() { return TRTFUSE_ARCHITECTURES; }

}  // extern "C"
