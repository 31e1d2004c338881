#include "bindings/verbs.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "fabric/verbs/card.h"
#include "fabric/verbs/queue_pair.h"

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
    m.def(
        "card_ports",
        [](const std::string& library) { return verbs::find_ports(*Library::load(library)); },
        py::arg("library"), "Those of this machine, by libibverbs.");
    py::class_<QueuePair, std::shared_ptr<QueuePair>>(m, "QueuePair")
        .def("address", [](const QueuePair& pair) { return py::bytes(pair.address()); })
        .def(
            "connect",
            [](QueuePair& pair, const py::bytes& address) { pair.connect(std::string(address)); },
            py::arg("address"), "With another one, by its address; both ends before either sends.");
    py::class_<Card, std::shared_ptr<Card>>(m, "Card", "A port that is opened.")
        .def(py::init([](const std::string& library, const Port& port) {
                 return std::make_shared<Card>(Library::load(library), port);
             }),
             py::kw_only(), py::arg("library"), py::arg("port"))
        .def_property_readonly("port_name", &Card::name)
        .def(
            "queue_pair",
            [](const std::shared_ptr<Card>& card) { return std::make_shared<QueuePair>(card); },
            "For SoftwareNic.start, once it is connected.");
}

}  // namespace ep
