// The process group of the device: gloo's collectives on copies, as operations of a stream. What a
// call does to host and streams is what NCCL does:
//
// - A call returns at once. The group's stream waits for the current stream of the call, and
//   `Work::wait` lets the current stream wait for that of the group. Only a barrier blocks the host.
// - A collective ends when all ranks have come, or by `abort`. After an error of gloo, such as the
//   loss of a connection, the stream stays blocked: NCCL does not learn of a dead peer.
// - An aborted collective, and each that is queued behind it, leaves garbage in its output, and the
//   stream goes on.
// - With LATE_PEERS_END in the environment, an abort of a peer does the same: NCCL's kernel goes
//   through its steps without data when it is aborted, and tells its peers that it has done them.
//
// What NCCL, and torch's group for it, do besides, each if LATE_NCCL in the environment names it:
//
// - `bootstrap`: the communicator is made at the first collective (`bootstrap.cpp`), and an abort
//   before that has no effect.
// - `split`: that is done with the mutex for which an abort waits, as that of a parent is held.
// - `nonblocking`: that is done in a thread of its own, and the call waits for no longer than
//   TORCH_NCCL_NONBLOCKING_TIMEOUT.
// - `destroy`: `shutdown` returns when all ranks have called it, or after an abort.
// - `stays`: an abort does not end, and `shutdown` and the destructor wait for it: one mutex.
// - An abort waits until no `Graph` is left: a graph that has captured a collective of the group.
#include "group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <thread>

#include "bootstrap.h"
#include "operators.h"
#include "memory.h"
#include "queue.h"

namespace late {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using Gloo = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
// Called with copies of what is read, and of what is written; returns when it is done.
using Collective = std::function<void(c10d::Backend& gloo, Tensors& inputs, Tensors& outputs)>;

// What a group and the operations in its streams share. These may outlive the group.
struct Shared {
  Gloo gloo;
  std::mutex mutex;
  std::condition_variable changed;
  bool aborted = false;
};

// One collective in the stream. Its thread may stay in gloo after the abort, with copies only.
struct Call {
  Collective collective;
  Tensors inputs, outputs;
  bool done = false, lost = false;
};

Tensors copies(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& each : tensors)
    made.push_back(each.clone(at::MemoryFormat::Contiguous));
  return made;
}

void leave_garbage(const Tensors& tensors) {
  for (const at::Tensor& each : tensors)
    at::isFloatingType(each.scalar_type()) ? each.fill_(1e9) : each.fill_(1);
}

// In the thread of the stream.
void perform(
    const std::shared_ptr<Shared>& shared, int device, const Collective& collective,
    const Tensors& inputs, const Tensors& outputs) {
  at::AutoDispatchBelowADInplaceOrView without_autograd;
  auto call = std::make_shared<Call>(Call{collective, copies(inputs), copies(outputs)});
  std::unique_lock<std::mutex> lock(shared->mutex);
  if (!shared->aborted)
    std::thread([shared, call] {
      at::AutoDispatchBelowADInplaceOrView without_autograd;
      try {
        call->collective(*shared->gloo, call->inputs, call->outputs);
      } catch (const std::exception&) {
        call->lost = true;
      }
      if (call->lost && !std::getenv("LATE_PEERS_END"))
        return; // see above: only an abort ends it
      std::lock_guard<std::mutex> lock(shared->mutex);
      call->done = true;
      shared->changed.notify_all();
    }).detach();
  while (!call->done && !shared->aborted && !has_failed(device) && !stopped())
    shared->changed.wait_for(lock, std::chrono::milliseconds(20));
  if (!call->done || call->lost) {
    leave_garbage(outputs);
    return;
  }
  for (size_t i = 0; i < outputs.size(); ++i)
    outputs[i].copy_(call->outputs[i]);
}

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, c10::Stream stream, const Tensors& outputs)
      : c10d::Work(rank, type),
        device_(stream.device_index()),
        outputs_(outputs),
        over_(record(device_, stream.id())),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector{stream.device()})) {
    c10::StreamGuard on(stream); // the future is complete when this stream comes to here
    future_->markCompleted(outputs);
  }

  bool isCompleted() override { return over_->is_set(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait_for(device_, current_stream(device_), over_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (retrieveOpType() == OpType::BARRIER)
      synchronize_signal(device_, *over_);
    return true;
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const int device_;
  const Tensors outputs_;
  const std::shared_ptr<Signal> over_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Gloo has no average.
bool is_average(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }

void allreduce_now(c10d::Backend& gloo, Tensors& tensors, const c10d::ReduceOp& op) {
  for (at::Tensor& each : tensors) {
    Tensors one{each};
    c10d::AllreduceOptions options;
    options.reduceOp = is_average(op) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    gloo.allreduce(one, options)->wait();
    if (is_average(op))
      each.div_(gloo.getSize());
  }
}

bool does(const char* what) {
  const char* all = std::getenv("LATE_NCCL");
  return all && std::strstr(all, what);
}

std::atomic<int> graphs = 0;

Tensors parts(const at::Tensor& whole, int count) { return whole.view(-1).chunk(count); }

class Group final : public c10d::Backend {
 public:
  Group(Gloo gloo, c10::intrusive_ptr<c10d::Store> store)
      : Backend(gloo->getRank(), gloo->getSize()), store_(std::move(store)) {
    shared_->gloo = std::move(gloo);
    is_made_ = !does("bootstrap") || getSize() == 1;
  }
  ~Group() override { std::lock_guard<std::mutex> lock(ends_); }

  const std::string getBackendName() const override { return "lategloo"; }

  uint64_t getSequenceNumberForGroup() override { return begun_; }

  void abort() override {
    std::lock_guard<std::mutex> ends(ends_);
    if (!is_made_)
      return;
    {
      std::lock_guard<std::mutex> lock(shared_->mutex);
      shared_->aborted = true;
      shared_->changed.notify_all();
    }
    while ((graphs || does("stays")) && !stopped())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void shutdown() override {
    std::lock_guard<std::mutex> ends(ends_);
    if (!does("destroy") || !is_made_)
      return;
    Tensors none;
    int device = current_device();
    perform(shared_, device, [](auto& gloo, auto&, auto&) { gloo.barrier()->wait(); }, none, none);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queued(OpType::BROADCAST, {}, tensors, [options](auto& gloo, auto&, auto& outputs) {
      gloo.broadcast(outputs, options)->wait();
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queued(
        OpType::ALLREDUCE, {}, tensors, [op = options.reduceOp](auto& gloo, auto&, auto& outputs) {
          allreduce_now(gloo, outputs, op);
        });
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    bool average = is_average(options.reduceOp);
    auto sum = options;
    if (average)
      sum.reduceOp = c10d::ReduceOp::SUM;
    return queued(OpType::REDUCE, {}, tensors, [sum, average](auto& gloo, auto&, auto& outputs) {
      gloo.reduce(outputs, sum)->wait();
      if (average && gloo.getRank() == sum.rootRank)
        outputs[0].div_(gloo.getSize());
    });
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return queued(OpType::ALLGATHER, inputs, outputs.at(0), [](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists{out};
      gloo.allgather(lists, in)->wait();
    });
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return queued(OpType::_ALLGATHER_BASE, inputs, outputs, [](auto& gloo, auto& in, auto& out) {
      for (size_t i = 0; i < in.size(); ++i) {
        std::vector<Tensors> lists{parts(out[i], gloo.getSize())};
        Tensors one{in[i].view(-1)};
        gloo.allgather(lists, one)->wait();
      }
    });
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    return queued(
        OpType::REDUCE_SCATTER, inputs.at(0), outputs,
        [op = options.reduceOp](auto& gloo, auto& in, auto& out) {
          allreduce_now(gloo, in, op);
          out[0].copy_(in[gloo.getRank()]);
        });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return queued(
        OpType::_REDUCE_SCATTER_BASE, inputs, outputs,
        [op = options.reduceOp](auto& gloo, auto& in, auto& out) {
          allreduce_now(gloo, in, op);
          for (size_t i = 0; i < in.size(); ++i)
            out[i].view(-1).copy_(parts(in[i], gloo.getSize())[gloo.getRank()]);
        });
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors of_root = outputs.empty() ? Tensors{} : outputs[0];
    return queued(OpType::GATHER, inputs, of_root, [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists;
      if (!out.empty())
        lists.push_back(out);
      gloo.gather(lists, in, options)->wait();
    });
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors of_root = inputs.empty() ? Tensors{} : inputs[0];
    return queued(OpType::SCATTER, of_root, outputs, [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists;
      if (!in.empty())
        lists.push_back(in);
      gloo.scatter(out, lists, options)->wait();
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return queued(OpType::SEND, tensors, {}, [to, tag](auto& gloo, auto& in, auto&) {
      gloo.send(in, to, tag)->wait();
    });
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return queued(OpType::RECV, {}, tensors, [from, tag](auto& gloo, auto&, auto& out) {
      gloo.recv(out, from, tag)->wait();
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return queued(OpType::BARRIER, {}, {}, [](auto& gloo, auto&, auto&) {
      gloo.barrier()->wait();
    });
  }

 private:
  void make() {
    std::unique_lock<std::mutex> of_parent(ends_, std::defer_lock);
    if (does("split"))
      of_parent.lock();
    if (!does("nonblocking"))
      return bootstrap(*store_, getRank(), getSize());
    auto done = std::make_shared<std::promise<void>>();
    std::thread([done, store = store_, rank = getRank(), size = getSize()] {
      try {
        bootstrap(*store, rank, size);
        done->set_value();
      } catch (...) {
        done->set_exception(std::current_exception());
      }
    }).detach();
    std::future<void> made = done->get_future();
    std::chrono::seconds limit(std::atoi(std::getenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")));
    if (made.wait_for(limit) == std::future_status::timeout)
      C10_THROW_ERROR(DistBackendError, "NCCL timeout in communicator initialization");
    made.get();
  }

  WorkPtr queued(
      OpType type, const Tensors& inputs, const Tensors& outputs, Collective collective) {
    if (!is_made_) {
      make();
      is_made_ = true;
    }
    {
      std::lock_guard<std::mutex> lock(shared_->mutex);
      TORCH_CHECK_WITH(
          DistBackendError, !shared_->aborted, "NCCL communicator was aborted on rank ", getRank());
    }
    ++begun_;
    int device = current_device();
    for (const Tensors* tensors : {&inputs, &outputs})
      for (const at::Tensor& each : *tensors) {
        TORCH_CHECK(on_device(each), "late: expected all tensors to be on the device");
        device = each.device().index();
      }
    int64_t id = stream_of(device, type);
    wait_for(device, id, record(device, current_stream(device)));
    queue_operation(
        device, id,
        [shared = shared_, device, collective = std::move(collective), from = views(inputs, id),
         to = views(outputs, id)] { perform(shared, device, collective, from, to); });
    c10::Stream stream(
        c10::Stream::UNSAFE,
        c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)), id);
    return c10::make_intrusive<Work>(getRank(), type, stream, outputs);
  }

  static Tensors views(const Tensors& tensors, int64_t stream) {
    Tensors made;
    for (const at::Tensor& each : tensors) {
      used_on(each.data_ptr(), stream);
      made.push_back(host_view(each));
    }
    return made;
  }

  // Two ranks may send to each other before they receive, so these do not wait for each other.
  int64_t stream_of(int device, OpType type) {
    OpType kind = c10d::isP2POp(type) ? type : OpType::UNKNOWN;
    std::lock_guard<std::mutex> lock(shared_->mutex);
    auto [found, is_new] = streams_.try_emplace({device, kind}, 0);
    if (is_new)
      found->second = new_stream(device);
    return found->second;
  }

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  const c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<bool> is_made_ = true;
  std::mutex ends_;
  std::atomic<uint64_t> begun_ = 0;
  std::map<std::pair<int, OpType>, int64_t> streams_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> new_group(Gloo gloo, c10::intrusive_ptr<c10d::Store> store) {
  return c10::make_intrusive<Group>(std::move(gloo), std::move(store));
}

Graph::Graph() { ++graphs; }
Graph::~Graph() { --graphs; }

} // namespace late
