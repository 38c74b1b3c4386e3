// What each file of bindings/ adds to the Python module megatron_moe_opt._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <utility>

#include "bindings/arguments.h"

namespace moe_opt {

namespace py = pybind11;

// Binds a function. A call with arguments of other types is refused by a second one that takes all: pybind11's own
// refusal prints the arguments, and PyTorch crashes where it prints a tensor whose memory was freed.
template <typename Scope, typename Function, typename... Extras>
void define(Scope&& scope, const char* name, Function&& function, const Extras&... extras) {
  scope.def(name, std::forward<Function>(function), extras...);
  scope.def(name, [name](const py::args&, const py::kwargs&) -> py::object {
    throw py::type_error(c10::str(name, " takes arguments of other types, or another number of them"));
  });
}

// Returns what calls a function of an object by its holder: an object that Python made without calling its class has
// none, and is refused.
template <typename Object, typename Function>
auto of_held(const char* name, Function function) {
  return [name, function](const std::shared_ptr<Object>& object) {
    check(object != nullptr, name, " is None");
    std::invoke(function, *object);
  };
}

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_row_map(py::module_& m);
void bind_permute(py::module_& m);
void bind_chunk_copy(py::module_& m);
void bind_wire_format(py::module_& m);
void bind_residual_codec(py::module_& m);
void bind_placement(py::module_& m);
void bind_exchange_plan(py::module_& m);
void bind_hop_plan(py::module_& m);
void bind_actions(py::module_& m);
void bind_executor(py::module_& m);

}  // namespace moe_opt
