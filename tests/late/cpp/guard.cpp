// What torch asks of a device type: devices, streams and events, from `queue.h`.
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <stdexcept>

#include "hooks.h"
#include "memory.h"
#include "queue.h"

namespace late {
namespace {

// torch knows an event as a pointer. It may be recorded again: who waits then waits for the signal
// of the time when it asked.
struct Event {
  std::shared_ptr<Signal> signal;
  int device;
};

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}

int index(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

// What goes back to the device before is done as CUDA's: it opens a context there.
struct On {
  explicit On(int device) : before(current_device()) { set_current_device(device); }
  ~On() { set_current_device(before); }
  const int before;
};

// torch's own threads of the backward pass, one for each device: a build with CUDA lets none of them
// open a context.
bool is_autograd() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string(name).starts_with("pt_autograd");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    is_autograd() ? move_to_device(index(device)) : set_current_device(index(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices)
      move_to_device(device.index());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index(device), current_stream(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index(device), kDefaultStream);
  }
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    if (lacks("streams"))
      return DeviceGuardImplInterface::getNewStream(device, priority);
    return stream_of(index(device), new_stream(index(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    if (lacks("queries"))
      return DeviceGuardImplInterface::queryStream(stream);
    return idle(stream.device_index(), stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    On on(device);
    synchronize_device(device);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device,
      const c10::EventFlag flag) const override {
    if (lacks("events"))
      DeviceGuardImplInterface::record(event, stream, device, flag);
    On on(stream.device_index());
    if (*event == nullptr)
      *event = new Event;
    *static_cast<Event*>(*event) = {
        late::record(stream.device_index(), stream.id()), stream.device_index()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr)
      return;
    On on(stream.device_index());
    wait_for(stream.device_index(), stream.id(), static_cast<Event*>(event)->signal);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr)
      return true;
    check(static_cast<Event*>(event)->device);
    return static_cast<Event*>(event)->signal->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr)
      return;
    Event of = *static_cast<Event*>(event);
    synchronize_signal(of.device, *of.signal);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex device) const override {
    if (lacks("times"))
      return DeviceGuardImplInterface::elapsedTime(start, end, device);
    On on(static_cast<Event*>(start)->device);
    auto *from = static_cast<Event*>(start), *to = static_cast<Event*>(end);
    if (from->device != to->device) // as CUDA
      throw std::invalid_argument("late: the events are of different devices");
    return to->signal->set_at_ms() - from->signal->set_at_ms();
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (event == nullptr)
      return;
    On on(device);
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    used_on(data.get(), stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace
} // namespace late
