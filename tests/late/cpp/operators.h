// Tensors of the device as the threads of its streams see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace late {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// A tensor of the host over the same pages. It does not keep the memory: as on other devices, memory
// that is freed too early is used again.
at::Tensor host_view(const at::Tensor& tensor);

// The device of the first argument that is on one; else the current device.
int device_of_arguments(const torch::jit::Stack& stack, size_t count);

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

} // namespace late
