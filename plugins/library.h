// The creators of all plugins, one a fused op.
#pragma once

#include "common/plugin.h"

namespace trtfuse {

Creator& bias_act_creator();
Creator& gated_act_creator();
Creator& layer_norm_creator();
Creator& skip_layer_norm_creator();
Creator& rms_norm_creator();
Creator& skip_rms_norm_creator();
Creator& softmax_creator();

}  // namespace trtfuse
