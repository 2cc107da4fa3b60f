// Functions of newer C libraries than a package of ours needs (glibc 2.35), which libraries in it call: they find
// them in the program.
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

/// Of glibc 2.36; libstdc++ calls it for std::random_device.
extern "C" __attribute__((visibility("default"))) std::uint32_t arc4random() noexcept {
  std::uint32_t bits = 0;
  while (::getrandom(&bits, sizeof bits, 0) != sizeof bits) {  // interrupted by a signal
  }
  return bits;
}
