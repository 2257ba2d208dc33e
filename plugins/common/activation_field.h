// The field `activation`.
#pragma once

#include "activation.h"
#include "plugin.h"

namespace trtfuse {

/// The activation that the field names. Throws Error with the names that there are.
inline Activation activation_of(const Fields& fields) {
    Activation activation;
    const std::string& name = fields.text("activation");
    if (parse_activation(name.c_str(), activation)) return activation;
    std::string known;
    for (const char* each : kActivationNames) known += std::string(known.empty() ? "" : ", ") + each;
    throw Error("field 'activation' is '" + name + "'; it must be one of " + known);
}

}  // namespace trtfuse
