// A plugin that ends the process that opens it, as one does that finds a driver it cannot take.
#include <cstdio>
#include <cstdlib>

extern "C" const void* GetPjrtApi() {
  std::fputs("check failed: a driver that it cannot take\n", stderr);
  std::abort();
}
