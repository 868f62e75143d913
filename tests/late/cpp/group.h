// The process group of the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace late {

// Its collectives are those of `gloo`, which is used by nothing else.
c10::intrusive_ptr<c10d::Backend> new_group(c10::intrusive_ptr<c10d::Backend> gloo);

} // namespace late
