// How the ranks of a group find each other before its first collective.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace late {

// Returns when all ranks have come. Nothing but an error of a socket ends it earlier.
void bootstrap(c10d::Store& store, int rank, int size);

} // namespace late
