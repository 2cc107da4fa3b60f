// A plugin that aborts the process that opens it, like one whose driver is unsupported.
#include <cstdio>
#include <cstdlib>

extern "C" const void* GetPjrtApi() {
  std::fputs("check failed: a driver that it cannot take\n", stderr);
  std::abort();
}
