// What the files of the extension share that know tensors and generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

#include <string>

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Allocator* device_allocator();
void register_hooks();

// The generator of the host whose numbers a generator of the device returns.
at::Generator host_generator(const at::Generator& generator);
at::Generator default_generator(int device);
// For Python, as bytes.
std::string default_state(int device);
void set_default_state(int device, const std::string& state);
void seed_default(int device, uint64_t seed);
uint64_t default_seed(int device);

} // namespace late
