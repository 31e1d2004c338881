#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/module.h"
#include "fabric/queue/software_nic.h"
#include "fabric/verbs/card.h"
#include "fabric/verbs/direct_pair.h"

namespace py = pybind11;

namespace ep {

void bind_verbs(py::module_& m) {
    using verbs::Card;
    using verbs::Library;
    using verbs::Port;
    using verbs::QueuePair;
    py::class_<Port>(m, "CardPort", "A port of a network card.")
        .def_readonly("device", &Port::device)
        .def_readonly("number", &Port::number)
        .def_readonly("is_ethernet", &Port::is_ethernet)
        .def_readonly("address", &Port::address)
        .def_readonly("lacks", &Port::lacks);
    // Loads libmlx5; null without its path.
    const auto load_mlx5 = [](const std::optional<std::string>& library) {
        return library ? verbs::Mlx5::load(*library) : nullptr;
    };
    m.def(
        "card_ports",
        [load_mlx5](const std::string& library, const std::optional<std::string>& mlx5) {
            const auto loaded = Library::load(library);
            if (!loaded->fork_error.empty() &&
                PyErr_WarnEx(PyExc_RuntimeWarning,
                             ("a process that forks may lose what network cards write: "
                              "ibv_fork_init: " +
                              loaded->fork_error)
                                 .c_str(),
                             1))
                throw py::error_already_set();
            return verbs::find_ports(*loaded, load_mlx5(mlx5).get());
        },
        py::arg("library"), py::arg("mlx5") = py::none(),
        "Returns this machine's ports. library, mlx5: names of libibverbs, and of libmlx5 or "
        "None.");
    py::class_<QueuePair, std::shared_ptr<QueuePair>>(m, "QueuePair")
        .def("address", [](const QueuePair& pair) { return py::bytes(pair.address()); })
        .def(
            "connect",
            [](QueuePair& pair, const py::bytes& address) { pair.connect(std::string(address)); },
            py::arg("address"), "Both ends must have connected before either sends.");
    py::class_<Card, std::shared_ptr<Card>>(m, "Card", "An opened port of a network card.")
        .def(py::init([load_mlx5](const std::string& library, const Port& port,
                                  const std::optional<std::string>& mlx5, uint8_t traffic_class,
                                  uint8_t service_level, uint16_t pkey_index, uint8_t ack_timeout,
                                  uint8_t retries) {
                 return std::make_shared<Card>(Library::load(library), port, load_mlx5(mlx5),
                                               verbs::Service{traffic_class, service_level,
                                                              pkey_index, ack_timeout, retries});
             }),
             py::kw_only(), py::arg("library"), py::arg("port"), py::arg("mlx5") = py::none(),
             py::arg("traffic_class"), py::arg("service_level"), py::arg("pkey_index"),
             py::arg("ack_timeout"), py::arg("retries"),
             "mlx5: None: ranks cannot post in its queues directly.")
        .def_property_readonly("is_direct", &Card::is_direct)
        .def(
            "try_queue",
            [](const std::shared_ptr<Card>& card) { verbs::DirectPair(card, SoftwareNic::kDepth); },
            "Makes a queue in which ranks can post directly, and frees it. Raises RuntimeError.")
        .def_property_readonly("port_name", &Card::name)
        .def(
            "queue_pair",
            [](const std::shared_ptr<Card>& card) { return std::make_shared<QueuePair>(card); },
            "Returns a pair for `SoftwareNic.start`, which must be connected before.");
}

}  // namespace ep
