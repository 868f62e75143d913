// Operators that run on the stream, later than they are called; all others synchronize the stream,
// and run on the host.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "hooks.h"
#include "queue.h"

namespace late {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Applies `change` to each tensor of an argument, in lists too. The argument itself is not changed.
template <class Change>
IValue changed(const IValue& argument, const Change& change) {
  if (argument.isTensor() && argument.toTensor().defined())
    return change(argument.toTensor());
  if (argument.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : argument.toTensorVector())
      made.push_back(change(each));
    return made;
  }
  return argument;
}

// What an operation on the stream reads and writes. A number on the host is read now.
at::Tensor operand(const at::Tensor& tensor) {
  if (on_device(tensor))
    return host_view(tensor);
  TORCH_CHECK(tensor.dim() == 0, "late: expected all tensors to be on the device");
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

at::Tensor meta(const at::Tensor& tensor) {
  if (!on_device(tensor))
    return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

template <class Change>
Stack changed_stack(const Stack& stack, size_t count, const Change& change) {
  Stack made;
  for (size_t i = stack.size() - count; i < stack.size(); ++i)
    made.push_back(changed(stack[i], change));
  return made;
}

void run(const c10::OperatorHandle& op, c10::DispatchKey key, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView without_autograd;
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
}

// An operator that writes to its first argument, or to lists of tensors.
void queued_in_place(const c10::OperatorHandle& op, Stack* stack) {
  size_t count = op.schema().arguments().size();
  int device = device_of_arguments(*stack, count);
  Stack operands = changed_stack(*stack, count, operand);
  queue_operation(device, current_stream(device), [op, operands]() mutable {
    run(op, c10::DispatchKey::CPU, operands);
  });
  IValue first = (*stack)[stack->size() - count];
  torch::jit::drop(*stack, count);
  if (!op.schema().returns().empty())
    stack->push_back(std::move(first));
}

// An operator that returns new tensors. Their shapes are known before, from torch's meta device.
void queued(const c10::OperatorHandle& op, Stack* stack) {
  size_t count = op.schema().arguments().size();
  int device = device_of_arguments(*stack, count);
  c10::DeviceGuard on({c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)});
  Stack operands = changed_stack(*stack, count, operand);
  Stack shapes = changed_stack(*stack, count, meta);
  run(op, c10::DispatchKey::Meta, shapes);
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> targets;
  for (const IValue& each : shapes) {
    const at::Tensor& shape = each.toTensor();
    results.push_back(at::detail::empty_strided_generic(
        shape.sizes(), shape.strides(), device_allocator(),
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.scalar_type()));
    targets.push_back(host_view(results.back()));
  }
  queue_operation(device, current_stream(device), [op, operands, targets]() mutable {
    run(op, c10::DispatchKey::CPU, operands);
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    for (size_t i = 0; i < targets.size(); ++i)
      targets[i].copy_(operands[i].toTensor());
  });
  torch::jit::drop(*stack, count);
  for (auto& result : results)
    stack->push_back(std::move(result));
}

// While it exists, the default generator of the host has the state of that of the device.
class DefaultGenerator {
 public:
  explicit DefaultGenerator(int device)
      : lock_(mutex()), device_(host_generator(default_generator(device))) {
    before_ = host_.get_state();
    host_.set_state(device_.get_state());
  }
  ~DefaultGenerator() {
    device_.set_state(host_.get_state());
    host_.set_state(before_);
  }

 private:
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator host_ = at::detail::getDefaultCPUGenerator();
  at::Generator device_;
  at::Tensor before_;
};

void on_host(const c10::OperatorHandle& op, Stack* stack) {
  size_t count = op.schema().arguments().size();
  int device = device_of_arguments(*stack, count);
  c10::DeviceGuard on({c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)});
  synchronize(device, current_stream(device));
  bool given = false;
  for (size_t i = stack->size() - count; i < stack->size(); ++i)
    if ((*stack)[i].isGenerator()) {
      (*stack)[i] = host_generator((*stack)[i].toGenerator());
      given = true;
    }
  std::optional<DefaultGenerator> of_device;
  if (!given && op.hasTag(at::Tag::nondeterministic_seeded))
    of_device.emplace(device);
  at::native::cpu_fallback(op, stack);
}

constexpr const char* kInPlace[] = {
    "add_.Tensor", "add_.Scalar", "sub_.Tensor", "sub_.Scalar", "mul_.Tensor", "mul_.Scalar",
    "div_.Tensor", "div_.Scalar", "addcmul_", "addcdiv_", "lerp_.Scalar", "lerp_.Tensor",
    "sqrt_", "neg_", "reciprocal_", "abs_", "zero_", "fill_.Scalar", "fill_.Tensor", "clamp_",
    "clamp_min_", "clamp_max_", "relu_", "_fused_adam_", "_fused_adam_.tensor_lr",
    "_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr",
    "_fused_adagrad_", "_fused_adagrad_.tensor_lr",
    "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"};

constexpr const char* kNewTensors[] = {
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg", "abs", "sqrt", "rsqrt",
    "reciprocal", "exp", "log", "pow.Tensor_Scalar", "maximum", "minimum", "lerp.Scalar",
    "addcmul", "addcdiv", "mm", "addmm", "bmm", "tanh", "tanh_backward", "sigmoid",
    "sigmoid_backward", "threshold_backward", "mse_loss", "mse_loss_backward", "sum.dim_IntList",
    "mean.dim", "eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar", "lt.Scalar", "gt.Scalar",
    "_log_softmax", "_log_softmax_backward_data", "cat"};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : kInPlace)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&queued_in_place>());
  for (const char* name : kNewTensors)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&queued>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

} // namespace

int device_of_arguments(const Stack& stack, size_t count) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const IValue& argument = stack[i];
    if (argument.isTensor() && on_device(argument.toTensor()))
      return argument.toTensor().device().index();
    if (argument.isTensorList())
      for (const at::Tensor& each : argument.toTensorVector())
        if (on_device(each))
          return each.device().index();
    if (argument.isDevice() && argument.toDevice().is_privateuseone() &&
        argument.toDevice().has_index())
      return argument.toDevice().index();
  }
  return current_device();
}

} // namespace late
