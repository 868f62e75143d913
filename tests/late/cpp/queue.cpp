// Queues, their threads, delays, events, gates, and the error of a device. No tensors.
#include "queue.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <stdexcept>
#include <thread>
#include <vector>

namespace late {
namespace {

std::atomic<bool> used{false};
std::atomic<bool> is_forked{false};
std::atomic<bool> stopping{false};
std::atomic<uint64_t> seed{0};
std::atomic<int64_t> longest_us{0};

struct Device {
  std::atomic<bool> opened{false};
  std::string opener; // the thread; with the mutex held
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string message;
  std::atomic<uint64_t> operations{0};
  std::once_flag started;
};

// Never destroyed: the threads may outlive the static objects of the library.
Device* devices() {
  static auto* all = new Device[kDevices];
  return all;
}

void open_context(int device) {
  auto& each = devices()[device];
  if (each.opened)
    return;
  std::lock_guard<std::mutex> lock(each.mutex);
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (!each.opened)
    each.opener = std::to_string(gettid()) + " " + name;
  each.opened = true;
}

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

struct Task {
  std::function<void()> run;
  bool operation;
  int64_t delay_us;
};

class Queue {
 public:
  Queue(int device, int64_t number) : device_(device), number_(number) {}

  void start() {
    std::thread([this] { serve(); }).detach();
  }

  void put(std::function<void()> run, bool operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t delay = 0;
    if (operation) {
      delay = delay_us(seed, longest_us, device_, number_, count_++);
      ++devices()[device_].operations;
    }
    tasks_.push_back({std::move(run), operation, delay});
    changed_.notify_one();
  }

  void restart_count() {
    std::lock_guard<std::mutex> lock(mutex_);
    count_ = 0;
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }

  bool busy() {
    std::lock_guard<std::mutex> lock(mutex_);
    return busy_;
  }

  void await(std::shared_ptr<Signal> signal) {
    set_awaited(signal);
    signal->wait([this] { return has_failed(device_) || stopping; });
    set_awaited(nullptr);
  }

  // Whether nothing runs and nothing can; `done` counts what has been done.
  bool is_still(uint64_t& done) {
    std::lock_guard<std::mutex> lock(mutex_);
    done += done_;
    return (tasks_.empty() && !busy_) || (awaited_ && !awaited_->is_set());
  }

 private:
  void serve() {
    pthread_setname_np(pthread_self(), "late_stream");
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        done_ += busy_;
        busy_ = false;
        changed_.wait(lock, [&] { return !tasks_.empty() && !stopping; });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
      }
      if (task.operation && devices()[device_].failed)
        continue;
      if (task.delay_us > 0)
        std::this_thread::sleep_for(std::chrono::microseconds(task.delay_us));
      try {
        task.run();
      } catch (const std::exception& error) {
        fail_now(device_, error.what());
      }
    }
  }

  void set_awaited(std::shared_ptr<Signal> signal) {
    std::lock_guard<std::mutex> lock(mutex_);
    awaited_ = std::move(signal);
  }

  const int device_;
  const int64_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Signal> awaited_;
  uint64_t done_ = 0;
  std::deque<Task> tasks_;
  bool busy_ = false;
  uint64_t count_ = 0;
};

Queue& queue_of(int device, int64_t stream) {
  static auto* all = [] {
    auto* made = new std::vector<std::vector<std::unique_ptr<Queue>>>(kDevices);
    for (int d = 0; d < kDevices; ++d)
      for (int64_t s = 0; s <= kPoolSize; ++s)
        (*made)[d].push_back(std::make_unique<Queue>(d, s));
    return made;
  }();
  return *all->at(device).at(stream);
}

// The threads of a device start all at once: as on others, a new stream costs the process nothing
// that a search for leaks could see.
void put(int device, int64_t stream, std::function<void()> run, bool operation) {
  std::call_once(devices()[device].started, [device] {
    for (int64_t s = 0; s <= kPoolSize; ++s)
      queue_of(device, s).start();
  });
  queue_of(device, stream).put(std::move(run), operation);
}

thread_local int device_now = 0;
thread_local int64_t stream_now[kDevices] = {};

} // namespace

void Signal::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  set_ = true;
  set_at_ms_ = now_ms();
  changed_.notify_all();
}

bool Signal::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

double Signal::set_at_ms() {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_at_ms_;
}

void Signal::wait(const std::function<bool()>& give_up) {
  std::unique_lock<std::mutex> lock(mutex_);
  // A failing device does not know who waits for what, so it is looked for now and then.
  while (!set_ && !give_up())
    changed_.wait_for(lock, std::chrono::milliseconds(20));
}

int current_device() { return device_now; }

void move_to_device(int device) {
  if (device < 0 || device >= kDevices)
    throw std::out_of_range("late: there is no device " + std::to_string(device));
  device_now = device;
}

void set_current_device(int device) {
  int before = device_now;
  move_to_device(device);
  if (device != before)
    open_context(device);
}

bool has_context(int device) { return devices()[device].opened; }

std::string contexts() {
  std::string all;
  for (int d = 0; d < kDevices; ++d) {
    std::lock_guard<std::mutex> lock(devices()[d].mutex);
    if (devices()[d].opened)
      all += (all.empty() ? "" : ", ") + std::to_string(d) + " by " + devices()[d].opener;
  }
  return all;
}

int64_t current_stream(int device) { return stream_now[device]; }
void set_current_stream(int device, int64_t stream) { stream_now[device] = stream; }

int64_t new_stream(int device) {
  static std::atomic<int64_t> next[kDevices] = {};
  check(device);
  return 1 + next[device]++ % kPoolSize;
}

void queue_operation(int device, int64_t stream, std::function<void()> operation) {
  check(device);
  mark_in_use();
  open_context(device);
  put(device, stream, std::move(operation), true);
}

void queue_control(int device, int64_t stream, std::function<void()> control) {
  mark_in_use();
  open_context(device);
  put(device, stream, std::move(control), false);
}

std::shared_ptr<Signal> record(int device, int64_t stream) {
  check(device);
  auto signal = std::make_shared<Signal>();
  queue_control(device, stream, [signal] { signal->set(); });
  return signal;
}

void wait_for(int device, int64_t stream, std::shared_ptr<Signal> signal) {
  check(device);
  queue_control(device, stream, [device, stream, signal] {
    queue_of(device, stream).await(signal);
  });
}

std::shared_ptr<Signal> hold(int device, int64_t stream) {
  auto gate = std::make_shared<Signal>();
  wait_for(device, stream, gate);
  return gate;
}

void settle() {
  // Twice the same, as a stream that was looked at may have been woken by one that was not yet.
  for (int64_t before = -1;;) {
    uint64_t done = 0;
    bool still = true;
    for (int d = 0; d < kDevices; ++d)
      for (int64_t s = 0; s <= kPoolSize; ++s)
        still = queue_of(d, s).is_still(done) && still;
    if (still && before == static_cast<int64_t>(done))
      return;
    before = still ? static_cast<int64_t>(done) : -1;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

bool idle(int device, int64_t stream) {
  check(device);
  return queue_of(device, stream).idle();
}

void synchronize_signal(int device, Signal& signal) {
  signal.wait([] { return forked(); });
  check(device);
}

void synchronize(int device, int64_t stream) {
  check(device);
  if (!queue_of(device, stream).idle())
    synchronize_signal(device, *record(device, stream));
  check(device);
}

void synchronize_device(int device) {
  check(device);
  for (int64_t stream = 0; stream <= kPoolSize; ++stream)
    synchronize(device, stream);
}

void set_delays(uint64_t new_seed, int64_t new_longest_us) {
  seed = new_seed;
  longest_us = new_longest_us;
  for (int d = 0; d < kDevices; ++d)
    for (int64_t s = 0; s <= kPoolSize; ++s)
      queue_of(d, s).restart_count();
}

uint64_t operations_queued(int device) { return devices()[device].operations; }

int64_t delay_us(uint64_t seed, int64_t longest_us, int device, int64_t stream, uint64_t number) {
  if (longest_us <= 0)
    return 0;
  // splitmix64
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + (number << 16) + (stream << 8) + device;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return static_cast<int64_t>((x ^ (x >> 31)) % static_cast<uint64_t>(longest_us + 1));
}

void fail(int device, int64_t stream, const std::string& message) {
  queue_operation(device, stream, [device, message] { fail_now(device, message); });
}

void fail_now(int device, const std::string& message) {
  auto& each = devices()[device];
  std::lock_guard<std::mutex> lock(each.mutex);
  if (!each.failed)
    each.message = message;
  each.failed = true;
}

bool has_failed(int device) { return devices()[device].failed; }

void check(int device) {
  if (is_forked)
    throw std::runtime_error("Cannot re-initialize late in forked subprocess");
  auto& each = devices()[device];
  if (!each.failed)
    return;
  std::lock_guard<std::mutex> lock(each.mutex);
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1, "late error: " + each.message);
}

bool lacks(const std::string& hook) {
  static const char* const lacking = std::getenv("LATE_WITHOUT");
  return lacking != nullptr && hook == lacking;
}

bool in_use() { return used; }

void mark_in_use() {
  static auto once = pthread_atfork(nullptr, nullptr, [] { is_forked = used.load(); });
  (void)once;
  used = true;
}

bool forked() { return is_forked; }

bool stopped() { return stopping; }

void stop() {
  if (is_forked)
    return;
  stopping = true;
  for (int d = 0; d < kDevices; ++d)
    for (int64_t s = 0; s <= kPoolSize; ++s) {
      // What still runs is one operation of a known length, or sees `stopping`.
      for (int i = 0; i < 2000 && queue_of(d, s).busy(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

} // namespace late
