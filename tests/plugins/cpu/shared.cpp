// The shared memory whose size a launch gives.
#include "cuda_runtime.h"

namespace trtfuse {
thread_local float4 memory[227 * 1024 / sizeof(float4)];
}
