// The process group of the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace late {

// Its collectives are those of `gloo`, which is used by nothing else.
c10::intrusive_ptr<c10d::Backend> new_group(
    c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store);

// A graph that has captured a collective: an abort of any group does not end while one exists.
struct Graph {
  Graph();
  ~Graph();
};

} // namespace late
