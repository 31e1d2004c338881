#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace ep::verbs {

// A shared library and its symbols. Never unloaded.
class Symbols {
  public:
    // name: as dlopen takes it. needs: the version that the error for a missing symbol asks for.
    // This and find() throw std::runtime_error.
    Symbols(const std::string& name, const char* needs)
        : name_(name), needs_(needs), handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (!handle_) throw std::runtime_error(dlerror());
    }

    template <class F>
    void find(F& function, const char* symbol) const {
        void* found = dlsym(handle_, symbol);
        if (!found) throw std::runtime_error(name_ + " has no " + symbol + ": it needs " + needs_);
        function = reinterpret_cast<F>(found);
    }
    // Returns null if it is missing.
    template <class F>
    F find_if_any(const char* symbol) const {
        return reinterpret_cast<F>(dlsym(handle_, symbol));
    }

  private:
    std::string name_;
    const char* needs_;
    void* handle_;
};

}  // namespace ep::verbs
