// Symmetric memory of the device: its rendezvous, as torch has it for CUDA. The ranks of a group
// meet in the group's store, under a number that each process counts by itself and for ever.
#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "hooks.h"
#include "memory.h"
#include "queue.h"

namespace late {
namespace {

namespace symmetric = c10d::symmetric_memory;
using GroupName = std::optional<std::string>;

// What the members of a group have agreed on. The memory of another one is out of reach.
struct Agreed final : symmetric::SymmetricMemory {
  Agreed(int device, int rank, int size) : device(device), rank(rank), size(size) {}

  std::vector<void*> get_buffer_ptrs() override { return {}; }
  std::vector<void*> get_signal_pad_ptrs() override { return {}; }
  void** get_buffer_ptrs_dev() override { return nullptr; }
  void** get_signal_pad_ptrs_dev() override { return nullptr; }
  size_t get_buffer_size() override { return 0; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void barrier(int, size_t) override {}
  void put_signal(int, int, size_t) override {}
  void wait_signal(int, int, size_t) override {}
  int get_rank() override { return rank; }
  int get_world_size() override { return size; }
  c10::Device get_device() override { return {kType, static_cast<c10::DeviceIndex>(device)}; }

  const int device, rank, size;
};

struct Allocator final : symmetric::SymmetricMemoryAllocator {
  void* alloc(size_t size, int device, const GroupName&) override { return allocate(device, size); }
  void free(void* address) override { release(address); }
  size_t get_alloc_size(void*) override { return 0; }
  bool has_multicast_support(int) override { return false; }
  bool has_allocation(void* address) override { return is_device_memory(address); }
  c10::DeviceType supported_device_type() override { return kType; }
  std::string name() override { return "LATE"; }

  c10::intrusive_ptr<symmetric::SymmetricMemory> rendezvous(
      void* address, const GroupName& name) override {
    auto group = c10d::resolve_process_group(name.value());
    std::string number = "late/" + std::to_string(met_++) + "/";
    group->getStore()->set(number + std::to_string(group->getRank()), "here");
    for (int rank = 0; rank < group->getSize(); ++rank)
      group->getStore()->wait({number + std::to_string(rank)});
    return c10::make_intrusive<Agreed>(device_of(address), group->getRank(), group->getSize());
  }

 private:
  std::atomic<uint64_t> met_ = 0;
};

[[maybe_unused]] const bool registered = [] {
  symmetric::register_allocator(kType, c10::make_intrusive<Allocator>());
  return true;
}();

} // namespace
} // namespace late

#endif
