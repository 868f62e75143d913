// The memory of the device `late`: addresses that the host cannot read, and a second mapping of the
// same pages for the threads of its streams.
#pragma once

#include <cstddef>
#include <cstdint>

namespace late {

// Memory for the current stream of the device. Its contents are garbage once the stream gets to
// here: until then, what is queued before may still use a block that was released.
void* allocate(int device, size_t size);
// As with CUDA, the memory may be used again at once by what is queued on the same stream, and by
// nothing before the streams of `used_on` have done what was queued on them.
void release(void* address) noexcept;
void used_on(void* address, int64_t stream);

bool is_device_memory(const void* address);
int device_of(const void* address);
// What the threads of the streams use in place of a device address; only for operations.
char* mapped(const void* address);

size_t allocated_bytes(int device);
size_t peak_bytes(int device); // the most that was allocated since `reset_peak`
void reset_peak(int device);
size_t reserved_bytes(int device); // was ever allocated, and is kept
size_t arena_bytes();

void* allocate_pinned(size_t size);
void release_pinned(void* address) noexcept;
bool is_pinned(const void* address);

} // namespace late
