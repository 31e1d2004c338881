// Arguments of kernels from Python, by the names of their members.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>

namespace ep {

// Functions that set a member to a number or address, by its name.
template <class Args>
using Setter = void (*)(Args&, uint64_t);
template <class Args>
using Setters = std::unordered_map<std::string_view, Setter<Args>>;

template <class T>
T as(uint64_t value) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(value);
    } else {
        return static_cast<T>(value);
    }
}

template <class Args, auto... kPath>
void set(Args& args, uint64_t value) {
    auto& member = (args.*....*kPath);
    member = as<std::remove_reference_t<decltype(member)>>(value);
}

// Entries of a table of setters: of a member of A, and of any function.
#define EP_MEMBER(name) {#name, set<A, &A::name>}
#define EP_SETTER(name, ...) {name, __VA_ARGS__}

template <class Args>
Setter<Args> setter_of(const Setters<Args>& setters, const std::string& name) {
    const auto found = setters.find(name);
    if (found == setters.end()) throw pybind11::key_error(name);
    return found->second;
}

inline uint64_t number(PyObject* value) {
    const uint64_t n = PyLong_AsUnsignedLongLong(value);
    if (n == ~uint64_t{0} && PyErr_Occurred()) throw pybind11::error_already_set();
    return n;
}

// Returns the value of a member: a number, the address of a tensor, or 0 for None. Throws for a
// tensor whose storage was freed, and one that holds others, such as a DTensor: their address is 0.
inline uint64_t value_of(const std::string& name, PyObject* value) {
    if (PyLong_Check(value)) return number(value);
    if (value == Py_None) return 0;
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* const address = PyObject_CallMethodNoArgs(value, data_ptr);
    if (!address) throw pybind11::error_already_set();
    const uint64_t place = number(pybind11::reinterpret_steal<pybind11::object>(address).ptr());
    if (place == 0 && pybind11::handle(value).attr("numel")().cast<uint64_t>() != 0)
        throw pybind11::value_error(name + " is a " + Py_TYPE(value)->tp_name +
                                    " without memory, must have memory");
    return place;
}

template <class Args>
void fill(Args& args, const Setters<Args>& setters, const pybind11::dict& members) {
    for (const auto& [key, value] : members) {
        const auto name = pybind11::cast<std::string>(key);
        setter_of(setters, name)(args, value_of(name, value.ptr()));
    }
}

}  // namespace ep
