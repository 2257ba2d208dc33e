// The activations by the names that files carry; their arithmetic is in activation.cuh.
#pragma once

#include <cstdint>
#include <cstring>

namespace trtfuse {

enum class Activation : int32_t {
    kRelu,
    kSigmoid,
    kTanh,
    kGelu,
    kGeluTanh,
    kQuickGelu,
    kSilu,
    kHardswish,
    kMish,
    kLeakyRelu,
};

inline constexpr const char* kActivationNames[] = {
    "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "quick_gelu", "silu", "hardswish", "mish", "leaky_relu"};
inline constexpr int kActivations = sizeof(kActivationNames) / sizeof(kActivationNames[0]);

/// The activation of that name; false if there is none.
inline bool parse_activation(const char* name, Activation& activation) {
    for (int i = 0; i < kActivations; ++i) {
        if (std::strcmp(name, kActivationNames[i]) == 0) {
            activation = static_cast<Activation>(i);
            return true;
        }
    }
    return false;
}

}  // namespace trtfuse
