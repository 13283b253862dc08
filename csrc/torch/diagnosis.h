// What reports need of the core, as Python's objects. The module calls it.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace smddp {

// Adds the functions for reports to the module.
void define_diagnosis(pybind11::module_& m);

}  // namespace smddp
