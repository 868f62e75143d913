// An arena for each device, mapped twice, with blocks that return to the stream that they were
// allocated on; and pinned memory of the host.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "queue.h"

namespace late {
namespace {

constexpr size_t kArenaBytes = size_t{8} << 30; // of addresses; pages are given when used
constexpr size_t kAlignment = 512;
constexpr int kGarbage = 0xFF; // NaN as floating point, -1 or an absurd size as an integer

struct Block {
  int64_t stream;
  size_t size;
  std::set<int64_t> used_on;
};

class Arena {
 public:
  explicit Arena(int device) : device_(device) {
    // A forked child must not see the pages: it has no device.
    pages_ = map(PROT_READ | PROT_WRITE);
    madvise(pages_, kArenaBytes, MADV_DONTFORK);
    addresses_ = map(PROT_NONE);
  }

  bool contains(const void* address) const {
    auto* at = static_cast<const char*>(address);
    return at >= addresses_ && at < addresses_ + kArenaBytes;
  }

  char* mapped(const void* address) const {
    return pages_ + (static_cast<const char*>(address) - addresses_);
  }

  void* allocate(int64_t stream, size_t size) {
    size = (size + kAlignment - 1) / kAlignment * kAlignment;
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    char* address = take(stream, size);
    blocks_[address] = {stream, size, {}};
    queue_control(device_, stream, [this, address, size] {
      std::memset(mapped(address), kGarbage, size);
    });
    return address;
  }

  void release(void* at) {
    char* address = static_cast<char*>(at);
    std::lock_guard<std::mutex> lock(mutex_);
    Block block = blocks_.at(address);
    blocks_.erase(address);
    allocated_ -= block.size;
    block.used_on.erase(block.stream);
    if (block.used_on.empty()) {
      reuse(address, block);
      return;
    }
    auto left = std::make_shared<std::atomic<size_t>>(block.used_on.size());
    for (int64_t stream : block.used_on)
      queue_control(device_, stream, [this, left, address, block] {
        if (--*left == 0) {
          std::lock_guard<std::mutex> lock(mutex_);
          reuse(address, block);
        }
      });
  }

  void used_on(void* address, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.upper_bound(static_cast<char*>(address));
    if (found != blocks_.begin())
      std::prev(found)->second.used_on.insert(stream);
  }

  size_t allocated() {
    std::lock_guard<std::mutex> lock(mutex_);
    return allocated_;
  }

  size_t peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
  }

  size_t reserved() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_;
  }

 private:
  static char* map(int protection) {
    void* made = mmap(
        nullptr, kArenaBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED)
      throw std::runtime_error("late: no address space for an arena");
    return static_cast<char*>(made);
  }

  // Call with the lock held.
  char* take(int64_t stream, size_t size) {
    auto& free = free_[{stream, size}];
    if (!free.empty()) {
      char* address = *free.begin();
      free.erase(free.begin());
      return address;
    }
    if (next_ + size > kArenaBytes)
      throw std::runtime_error("late: out of memory");
    char* address = addresses_ + next_;
    next_ += size;
    return address;
  }

  // Call with the lock held.
  void reuse(char* address, const Block& block) {
    free_[{block.stream, block.size}].insert(address);
  }

  const int device_;
  char* pages_;
  char* addresses_;
  std::mutex mutex_;
  size_t next_ = 0;
  size_t allocated_ = 0;
  size_t peak_ = 0;
  std::map<char*, Block> blocks_;
  std::map<std::pair<int64_t, size_t>, std::set<char*>> free_;
};

// Never destroyed, as the streams.
Arena& arena(int device) {
  static Arena* const arenas[kDevices] = {new Arena(0), new Arena(1)};
  return *arenas[device];
}

std::mutex pinned_mutex;

std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

} // namespace

void* allocate(int device, size_t size) {
  check(device);
  mark_in_use();
  return size == 0 ? nullptr : arena(device).allocate(current_stream(device), size);
}

void release(void* address) noexcept {
  if (address != nullptr && !forked())
    arena(device_of(address)).release(address);
}

void used_on(void* address, int64_t stream) {
  if (address != nullptr)
    arena(device_of(address)).used_on(address, stream);
}

bool is_device_memory(const void* address) {
  for (int device = 0; device < kDevices; ++device)
    if (arena(device).contains(address))
      return true;
  return false;
}

int device_of(const void* address) {
  for (int device = 0; device < kDevices; ++device)
    if (arena(device).contains(address))
      return device;
  throw std::invalid_argument("late: not an address of a device");
}

char* mapped(const void* address) { return arena(device_of(address)).mapped(address); }

size_t allocated_bytes(int device) { return in_use() ? arena(device).allocated() : 0; }
size_t peak_bytes(int device) { return in_use() ? arena(device).peak() : 0; }
void reset_peak(int device) { arena(device).reset_peak(); }
size_t reserved_bytes(int device) { return in_use() ? arena(device).reserved() : 0; }
size_t arena_bytes() { return kArenaBytes; }

void* allocate_pinned(size_t size) {
  void* made = nullptr;
  if (posix_memalign(&made, 64, size == 0 ? 1 : size) != 0)
    throw std::bad_alloc();
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned()[static_cast<char*>(made)] = size;
  return made;
}

void release_pinned(void* address) noexcept {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned().erase(static_cast<char*>(address));
  }
  std::free(address);
}

bool is_pinned(const void* address) {
  auto* at = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned().upper_bound(at);
  if (found == pinned().begin())
    return false;
  --found;
  return at < found->first + found->second;
}

} // namespace late
