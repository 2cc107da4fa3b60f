// A plugin that never returns, for tests of timeouts.
#include <unistd.h>

extern "C" const void* GetPjrtApi() {
  for (;;) ::pause();
}
