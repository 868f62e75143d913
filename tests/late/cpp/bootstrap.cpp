// NCCL's bootstrap, in small: what a rank does before a communicator exists, which no abort reaches.
//
// Each rank listens at two addresses, tells them to a thread of rank 0, and waits until that connects
// to the first one and tells it the second one of the next rank. Then all connect to a ring. `accept`
// is called again and again, on sockets that do not block. The types have what NCCL's have in the
// same places, 2.18 to 2.30: `ncclSocket` (`src/include/socket.h`) and `extInfo` (`src/bootstrap.cc`).
#include "bootstrap.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/exception.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "queue.h"

namespace late {
namespace {

union Address {
  sockaddr plain;
  sockaddr_in four;
  sockaddr_in6 six;
};
struct Socket {
  int descriptor = -1, accepts_from = -1, retries = 0;
  Address address{};
  volatile uint32_t* abort_flag = nullptr;
};
struct Info {
  int rank, ranks, root, roots, offset;
  Address of_root, of_ring;
};

int checked(int result, const char* what) {
  if (result < 0)
    C10_THROW_ERROR(
        DistBackendError,
        std::string("NCCL error: unhandled system error, ") + what + ": " + std::strerror(errno));
  return result;
}

Socket listening(int flags) {
  Socket made;
  made.descriptor = checked(socket(AF_INET, SOCK_STREAM | flags, 0), "socket");
  made.address.four.sin_family = AF_INET;
  made.address.four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  checked(bind(made.descriptor, &made.address.plain, sizeof(sockaddr_in)), "bind");
  checked(listen(made.descriptor, 1024), "listen");
  socklen_t length = sizeof(Address);
  checked(getsockname(made.descriptor, &made.address.plain, &length), "getsockname");
  return made;
}

void accept_from(Socket& into, const Socket& listener) {
  into = listener;
  into.descriptor = -1;
  into.accepts_from = listener.descriptor;
  while (into.descriptor < 0 && !stopped()) {
    socklen_t length = sizeof(Address);
    into.descriptor = accept(into.accepts_from, &into.address.plain, &length);
    if (into.descriptor < 0 && errno != EAGAIN && errno != EINTR)
      checked(-1, "accept");
    std::this_thread::sleep_for(std::chrono::milliseconds(1)); // NCCL does not sleep
  }
}

void connect_to(Socket& made, const Address& address) {
  made.address = address;
  made.descriptor = checked(socket(AF_INET, SOCK_STREAM, 0), "socket");
  checked(connect(made.descriptor, &made.address.plain, sizeof(sockaddr_in)), "connect");
}

void tell(const Address& address, const void* data, size_t size) {
  Socket made;
  connect_to(made, address);
  checked(static_cast<int>(send(made.descriptor, data, size, MSG_NOSIGNAL)), "send");
  close(made.descriptor);
}

// In a thread of rank 0. A rank is told as soon as the next one has come.
void serve(Socket listener, int size) {
  std::vector<std::unique_ptr<Info>> come(size);
  try {
    for (int count = 0; count < size; ++count) {
      Socket made;
      accept_from(made, listener);
      Info info;
      checked(static_cast<int>(recv(made.descriptor, &info, sizeof info, MSG_WAITALL)), "recv");
      close(made.descriptor);
      const int rank = info.rank, before = (rank + size - 1) % size, next = (rank + 1) % size;
      come[rank] = std::make_unique<Info>(info);
      if (come[before])
        tell(come[before]->of_root, &come[rank]->of_ring, sizeof(Address));
      if (come[next] && next != rank)
        tell(come[rank]->of_root, &come[next]->of_ring, sizeof(Address));
    }
  } catch (const std::exception&) {
    // The ranks that have not been told are ended as this thread was: by the end of their sockets.
  }
  close(listener.descriptor);
}

} // namespace

void bootstrap(c10d::Store& store, int rank, int size) {
  if (rank == 0) {
    Socket root = listening(0);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&root.address);
    store.set("bootstrap", std::vector<uint8_t>(bytes, bytes + sizeof(Address)));
    std::thread thread(serve, root, size);
    pthread_setname_np(thread.native_handle(), "NCCL BootstrapR");
    thread.detach();
  }
  const std::vector<uint8_t> found = store.get("bootstrap");
  Address root, next;
  std::memcpy(&root, found.data(), sizeof root);
  // As NCCL, the sockets of the ring are in the heap, and the one for the answer is on the stack.
  auto ring = std::make_unique<Socket>(listening(SOCK_NONBLOCK));
  auto from_before = std::make_unique<Socket>(), to_next = std::make_unique<Socket>();
  Socket for_root = listening(SOCK_NONBLOCK), answer;
  volatile Info info{rank, size, 0, 1, 0, {}, {}}; // it is in memory, as its address is passed on
  std::memcpy(const_cast<Address*>(&info.of_root), &for_root.address, sizeof(Address));
  std::memcpy(const_cast<Address*>(&info.of_ring), &ring->address, sizeof(Address));
  auto close_all = [&] {
    for (int each : {ring->descriptor, from_before->descriptor, to_next->descriptor,
                     for_root.descriptor, answer.descriptor})
      if (each >= 0)
        close(each);
  };
  try {
    tell(root, const_cast<Info*>(&info), sizeof info);
    accept_from(answer, for_root);
    checked(static_cast<int>(recv(answer.descriptor, &next, sizeof next, MSG_WAITALL)), "recv");
    connect_to(*to_next, next);
    accept_from(*from_before, *ring);
  } catch (...) {
    close_all();
    throw;
  }
  close_all();
}

} // namespace late
