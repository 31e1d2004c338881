#pragma once

#include <pybind11/pybind11.h>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <unordered_map>

namespace ep {

// How the members of T are set to a number, by their names: for a T of which Python makes a dict,
// which costs a call less than an object that is bound does.
template <class T>
using Members = std::unordered_map<std::string_view, void (*)(T&, uint64_t)>;

template <auto kMember, class T>
void set_member(T& object, uint64_t value) {
    using Member = std::remove_reference_t<decltype(object.*kMember)>;
    object.*kMember = static_cast<Member>(value);
}

template <class T>
concept HasMembers = requires {
    { members_of(static_cast<T*>(nullptr)) } -> std::same_as<const Members<T>&>;
};

}  // namespace ep

namespace pybind11::detail {

template <ep::HasMembers T>
struct type_caster<T> {
    PYBIND11_TYPE_CASTER(T, const_name("dict[str, int]"));

    bool load(handle source, bool) {
        if (!PyDict_Check(source.ptr())) return false;
        const auto& members = members_of(static_cast<T*>(nullptr));
        PyObject *key, *number;
        for (Py_ssize_t i = 0; PyDict_Next(source.ptr(), &i, &key, &number);) {
            Py_ssize_t size;
            const char* name = PyUnicode_AsUTF8AndSize(key, &size);
            if (name == nullptr) throw error_already_set();
            const auto member = members.find({name, static_cast<size_t>(size)});
            if (member == members.end()) throw key_error(name);
            const uint64_t n = PyLong_AsUnsignedLongLong(number);
            if (PyErr_Occurred()) throw error_already_set();
            member->second(value, n);
        }
        return true;
    }
};

}  // namespace pybind11::detail
