// A plugin that never answers, for tests of what waits for one.
#include <unistd.h>

extern "C" const void* GetPjrtApi() {
  for (;;) ::pause();
}
