// Allocators, random generators, and the hooks through which torch finds them.
#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <vector>

#include "memory.h"
#include "queue.h"

namespace late {
namespace {

c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    void* made = late::allocate(device, size);
    return {made, made, &release, device_at(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    int device = device_of(to);
    queue_operation(device, current_stream(device), [=] {
      std::memcpy(mapped(to), mapped(from), size);
    });
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* made = allocate_pinned(size);
    return {made, made, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

DeviceAllocator allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kType, &allocator)

// Draws the numbers of a generator of the host: its state is that of `torch.Generator()`.
struct LateGenerator final : c10::GeneratorImpl {
  LateGenerator(int device, at::Generator host)
      : c10::GeneratorImpl{device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)},
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  LateGenerator* clone_impl() const override {
    return new LateGenerator(device().index(), host.clone());
  }

  at::Generator host;
};

at::Generator new_generator(int device) {
  return at::make_generator<LateGenerator>(device, at::detail::createCPUGenerator());
}

const at::Generator& generator_of(int device) {
  static auto* all = new std::vector<at::Generator>{new_generator(0), new_generator(1)};
  return all->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0)
      move_to_device(device);
    return before;
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return lacks("generators") ? at::PrivateUse1HooksInterface::getDefaultGenerator(device)
                               : generator_of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    if (lacks("generators"))
      return at::PrivateUse1HooksInterface::getNewGenerator(device);
    return new_generator(device < 0 ? current_device() : device);
  }

  at::Device getDeviceFromPtr(void* address) const override {
    return device_at(device_of(address));
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return lacks("pinned memory") ? at::PrivateUse1HooksInterface::getPinnedMemoryAllocator()
                                  : &pinned_allocator;
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocator.allocate(size);
    if (size_t kept = std::min(size, storage.nbytes()))
      allocator.copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(size);
  }
};

} // namespace

c10::Allocator* device_allocator() { return &allocator; }
void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

at::Generator host_generator(const at::Generator& generator) {
  auto* of = dynamic_cast<LateGenerator*>(generator.unsafeGetGeneratorImpl());
  return of == nullptr ? generator : of->host;
}
at::Generator default_generator(int device) { return generator_of(device); }

std::string default_state(int device) {
  at::Tensor state = generator_of(device).get_state();
  return {static_cast<const char*>(state.data_ptr()), static_cast<size_t>(state.numel())};
}
void set_default_state(int device, const std::string& state) {
  at::Generator host = host_generator(generator_of(device));
  at::Tensor target = host.get_state();
  TORCH_CHECK(static_cast<size_t>(target.numel()) == state.size(), "late: not a state");
  std::memcpy(target.data_ptr(), state.data(), state.size());
  host.set_state(target);
}
void seed_default(int device, uint64_t seed) {
  host_generator(generator_of(device)).set_current_seed(seed);
}
uint64_t default_seed(int device) { return generator_of(device).current_seed(); }

} // namespace late
