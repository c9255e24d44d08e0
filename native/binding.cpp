// The extension module potluck._core._native. Only this file and its parts (bind_*.cpp) know Python; the
// core does not.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "core/kernels/cpu.hpp"
#include "core/patience.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    // A process may end without close(). Objects that its daemon threads hold are then alive at
    // exit, and nanobind would print them as leaks.
    nb::set_leak_warnings(false);
    m.doc() = "potluck's native core; src/potluck/_core/native.py is the only file that imports it";
    m.attr("version") = POTLUCK_VERSION;
    m.attr("interface") = POTLUCK_INTERFACE;  // src/potluck/_core/native.py compares it
#ifdef POTLUCK_OPENSSL
    m.attr("has_openssl") = true;
#else
    m.attr("has_openssl") = false;
#endif
    m.def("cpu_features", &potluck::cpu_features, "The features that this processor has.");
    m.def(
        "hold_deadlines", [](double until) { potluck::held_until = until; }, nb::arg("until"),
        "No operation is overdue before `until`, in seconds of time.monotonic().");
    potluck::bind::kernels(m);
    potluck::bind::shared_memory(m);
    potluck::bind::loop(m);
}
