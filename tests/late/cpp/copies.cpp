// Copies between the host and the device, and between devices; memory and views of tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "hooks.h"
#include "memory.h"
#include "operators.h"
#include "queue.h"

namespace late {

at::Tensor host_view(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0)
    return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  return at::from_blob(mapped(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

int device_of_tensor(const at::Tensor& tensor) { return tensor.device().index(); }

void queue_copy(int device, at::Tensor from, at::Tensor to) {
  queue_operation(device, current_stream(device), [from, to]() mutable {
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    to.copy_(from);
  });
}

// On the stream of the source; the stream of the target waits for it, and it for the target's.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  int source = device_of_tensor(from), target = device_of_tensor(to);
  wait_for(source, current_stream(source), record(target, current_stream(target)));
  queue_copy(source, host_view(from), host_view(to));
  wait_for(target, current_stream(target), record(source, current_stream(source)));
}

// A tensor of the host as a queued copy reads it: pinned memory when the stream gets to it, and
// other memory now, as the caller may write to it again after the call.
at::Tensor host_source(const at::Tensor& from) {
  if (from.numel() == 0 || is_pinned(from.data_ptr()))
    return from;
  at::AutoDispatchBelowADInplaceOrView without_autograd;
  return from.clone();
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(type));
}

const at::Tensor& resize(
    const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* of = tensor.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytesContiguous(
      sizes, tensor.dtype().itemsize(), tensor.storage_offset());
  if (needed > of->storage().nbytes()) {
    c10::DeviceGuard on(tensor.device());
    auto data = device_allocator()->allocate(needed);
    if (size_t kept = of->storage().nbytes())
      device_allocator()->copy_data(data.get(), of->storage().data(), kept);
    of->storage().set_data_ptr(std::move(data));
    of->storage().set_nbytes(needed);
  }
  of->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes())
    on_device(to) ? resize(to, from.sizes(), std::nullopt) : to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  int device = device_of_tensor(tensor);
  synchronize(device, current_stream(device));
  at::AutoDispatchBelowADInplaceOrView without_autograd;
  return host_view(tensor).item();
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  used_on(tensor.storage().mutable_data(), stream.id());
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t count = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {count}, {});
}

at::Tensor& set_empty(at::Tensor& tensor) {
  c10::DeviceGuard on(tensor.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return at::native::set_storage_cpu_(tensor, storage, 0, {0}, {});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

} // namespace

// A copy to the host that is not blocking is late into any memory, pinned or not: CUDA may do so.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0)
    return to;
  if (on_device(from) && on_device(to) && from.device() != to.device()) {
    copy_between_devices(from, to);
    return to;
  }
  int device = device_of_tensor(on_device(from) ? from : to);
  queue_copy(
      device, on_device(from) ? host_view(from) : host_source(from),
      on_device(to) ? host_view(to) : to);
  if (!non_blocking && (!on_device(from) || !on_device(to)))
    synchronize(device, current_stream(device));
  return to;
}

} // namespace late
