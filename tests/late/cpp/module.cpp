// The Python module: what tests set and ask; torch reaches the rest through its own interfaces.
#include <pybind11/pybind11.h>

#include <cstring>

#include "group.h"
#include "hooks.h"
#include "memory.h"
#include "queue.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true) // as torch declares it

namespace py = pybind11;
using no_gil = py::call_guard<py::gil_scoped_release>;

PYBIND11_MODULE(_late, m) {
  py::class_<late::Signal, std::shared_ptr<late::Signal>>(m, "Gate")
      .def("release", &late::Signal::set, no_gil())
      .def("is_released", &late::Signal::is_set, no_gil());
  py::class_<late::Graph>(m, "Graph").def(py::init());
  m.attr("device_count") = late::kDevices;
  m.attr("pool_size") = late::kPoolSize;
  m.def("register_hooks", &late::register_hooks);
  m.def("current_device", &late::current_device);
  m.def("current_stream", &late::current_stream);
  m.def("set_device", &late::set_current_device);
  m.def("hold", &late::hold, no_gil());
  m.def("set_delays", &late::set_delays, no_gil());
  m.def("delay_us", &late::delay_us);
  m.def("operations_queued", &late::operations_queued);
  m.def("synchronize", &late::synchronize_device, no_gil());
  m.def("fail", &late::fail, no_gil());
  m.def("has_failed", &late::has_failed);
  m.def("in_use", &late::in_use);
  m.def("contexts", &late::contexts);
  m.def("forked", &late::forked);
  m.def("allocated_bytes", &late::allocated_bytes);
  m.def("peak_bytes", &late::peak_bytes);
  m.def("reset_peak", &late::reset_peak);
  m.def("reserved_bytes", &late::reserved_bytes);
  m.def("arena_bytes", &late::arena_bytes);
  m.def("settle", &late::settle, no_gil());
  m.def("scribble", [](uintptr_t address, size_t size) {
    std::memset(late::mapped(reinterpret_cast<void*>(address)), 0xFF, size);
  });
  m.def("default_state", [](int device) { return py::bytes(late::default_state(device)); });
  m.def("set_default_state", &late::set_default_state);
  m.def("seed_default", &late::seed_default);
  m.def("default_seed", &late::default_seed);
  m.def("new_group", &late::new_group, no_gil());
  m.def("stop", &late::stop, no_gil());
}
