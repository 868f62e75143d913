// The streams of the device `late`: each is a queue with a thread that runs what was queued later
// than it was called, after a delay that follows from a seed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace late {

constexpr int kDevices = 2;
constexpr int64_t kDefaultStream = 0;
constexpr int64_t kPoolSize = 16; // further streams of a device, handed out in turn, as CUDA does

// Something that is not done now and will be: an event that was recorded, or a gate.
class Signal {
 public:
  void set();
  bool is_set();
  // Returns early, without the signal, if `give_up` becomes true.
  void wait(const std::function<bool()>& give_up);
  double set_at_ms(); // by the monotonic clock

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  double set_at_ms_ = 0;
};

// The current device and streams of the calling thread.
int current_device();
void set_current_device(int device); // throws std::out_of_range; opens a context there, as CUDA
void move_to_device(int device); // the same without a context, until something is done there
bool has_context(int device); // of this process
std::string contexts(); // the devices that have one, and the thread that has opened each
int64_t current_stream(int device);
void set_current_stream(int device, int64_t stream);
int64_t new_stream(int device);

// Work of the device: delayed, and not done once the device has failed.
void queue_operation(int device, int64_t stream, std::function<void()> operation);
// Bookkeeping: without a delay, and done on a failed device too.
void queue_control(int device, int64_t stream, std::function<void()> control);
std::shared_ptr<Signal> record(int device, int64_t stream);
void wait_for(int device, int64_t stream, std::shared_ptr<Signal> signal);
// The stream does nothing further until the signal is set, or the device fails.
std::shared_ptr<Signal> hold(int device, int64_t stream);

// Returns once all that can be done is done: each stream is idle, or waits for something that only
// the host, or a stream that waits itself, will do. Nothing must be queued meanwhile.
void settle();

bool idle(int device, int64_t stream);
void synchronize(int device, int64_t stream); // throws the device's error
void synchronize_device(int device);
void synchronize_signal(int device, Signal& signal);

// Delays between 0 and `longest_us`; the n-th of a stream follows from `seed`. Restarts the count.
void set_delays(uint64_t seed, int64_t longest_us);
uint64_t operations_queued(int device);
int64_t delay_us(uint64_t seed, int64_t longest_us, int device, int64_t stream, uint64_t number);

// An error that stays until the process ends. `fail` takes effect when the stream gets to it.
void fail(int device, int64_t stream, const std::string& message);
void fail_now(int device, const std::string& message);
bool has_failed(int device);
// Throws c10::AcceleratorError if the device has failed, std::runtime_error in a forked child.
void check(int device);

// Whether LATE_WITHOUT, in the environment when this is asked first, names this optional hook.
bool lacks(const std::string& hook);

bool in_use(); // whether anything was ever queued or allocated
void mark_in_use();
bool forked(); // whether this is the child of a process that had used the device
void stop(); // for the end of the process: no thread runs an operation any more
bool stopped();

} // namespace late
