// Functions of C libraries newer than the one that packages require (glibc 2.35). Bundled libraries call them, and find
// them in the program.
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

/// From glibc 2.36; libstdc++ calls it for std::random_device.
extern "C" __attribute__((visibility("default"))) std::uint32_t arc4random() noexcept {
  std::uint32_t bits = 0;
  while (::getrandom(&bits, sizeof bits, 0) != sizeof bits) {  // interrupted by a signal
  }
  return bits;
}
