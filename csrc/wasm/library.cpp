// The simulated allocator for WebAssembly: the sources of csrc/cpu as one file, with what they need of a C++ library beyond
// its headers. docs/make_page.py compiles it to a shared library, which Python in a browser loads through ctypes as another
// machine loads libzeroplan_cpu.so. It has no exceptions: a simulation that runs out of memory ends the page's Python.
#include <cstdlib>
#include <new>

#include "../cpu/abi.cpp"
#include "../cpu/allocator.cpp"
#include "../cpu/allocator_event_blocks.cpp"
#include "../cpu/allocator_events.cpp"
#include "../cpu/allocator_ranges.cpp"
#include "../cpu/allocator_segments.cpp"

// malloc and free are those of the program that loads the library.
void* operator new(std::size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) __builtin_trap();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

// libc++'s headers call this where they would throw.
void std::__libcpp_verbose_abort(const char*, ...) noexcept { __builtin_trap(); }
