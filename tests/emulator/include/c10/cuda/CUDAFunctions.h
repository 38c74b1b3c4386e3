#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {
inline DeviceIndex current_device() { return 0; }
}  // namespace c10::cuda
