// The CPU plugin with a fake profiler: it returns one plane without events. MD_TEST_PROFILER selects its behaviour:
// "size" returns only the size and writes into the caller's buffer, "terminated" counts a zero byte after the message,
// the message of "zero" ends with one, "refuse" fails to start.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/plugins/cpu_plugin_copy.h"

namespace {

struct ErrorArgs {
  size_t struct_size;
  void* priv;
  void* error;
  const char* message;
  size_t message_size;
};
struct CreateArgs {
  size_t struct_size;
  const char* options;
  size_t options_size;
  void* profiler;
};
struct ProfilerArgs {
  size_t struct_size;
  void* profiler;
};
struct CollectArgs {
  size_t struct_size;
  void* profiler;
  uint8_t* buffer;
  size_t buffer_size;
};

std::string mode() {
  const char* m = std::getenv("MD_TEST_PROFILER");
  return m ? m : "";
}
void* error(const char* words) { return new std::string(words); }
enum State { kCreated, kStarted, kStopped };

void* create(CreateArgs* a) {
  // ProfileOptions { host_tracer_level: 2 device_tracer_level: 1 version: 1 enable_hlo_proto: true }
  if (std::string(a->options, a->options_size) != "\x10\x02\x18\x01\x28\x01\x38\x01") return error("other options");
  a->profiler = new State(kCreated);
  return nullptr;
}
void* destroy(ProfilerArgs* a) {
  delete static_cast<State*>(a->profiler);
  return nullptr;
}
void* go(ProfilerArgs* a, State from, State to) {
  State& s = *static_cast<State*>(a->profiler);
  if (mode() == "refuse") return error("the counters are taken");
  if (s != from) return error("out of order");
  s = to;
  return nullptr;
}
void* start(ProfilerArgs* a) { return go(a, kCreated, kStarted); }
void* stop(ProfilerArgs* a) { return go(a, kStarted, kStopped); }
void* collect(CollectArgs* a) {
  // XSpace { planes { name } }; the name may end with a zero byte.
  static std::string space;
  space = mode() == "zero" ? std::string("\x0a\x0f\x12\x0d/device:TEST\0", 17) : "\x0a\x0f\x12\x0d/device:TEST0";
  if (mode() == "terminated") space += '\0';
  if (*static_cast<State*>(a->profiler) != kStopped) return error("not stopped");
  a->buffer_size = space.size();
  if (a->buffer)
    std::memcpy(a->buffer, space.data(), space.size());
  else if (mode() != "size")
    a->buffer = reinterpret_cast<uint8_t*>(const_cast<char*>(space.data()));
  return nullptr;
}
void error_destroy(ErrorArgs* a) { delete static_cast<std::string*>(a->error); }
void error_message(ErrorArgs* a) {
  const auto& words = *static_cast<std::string*>(a->error);
  a->message = words.data();
  a->message_size = words.size();
}

const struct {
  size_t struct_size;
  void* priv;
  void (*error_destroy)(ErrorArgs*);
  void (*error_message)(ErrorArgs*);
  void* error_get_code;
  void* (*create)(CreateArgs*);
  void* (*destroy)(ProfilerArgs*);
  void* (*start)(ProfilerArgs*);
  void* (*stop)(ProfilerArgs*);
  void* (*collect)(CollectArgs*);
} kApi = {sizeof kApi, nullptr, error_destroy, error_message, nullptr, create, destroy, start, stop, collect};

struct {
  PJRT_Extension_Base base;
  const void* api;
  int64_t context;
} extension;

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  static std::vector<char> copy = [] {
    std::vector<char> bytes = cpu_plugin_copy();
    auto* api = reinterpret_cast<PJRT_Api*>(bytes.data());
    extension = {{sizeof extension, PJRT_Extension_Type_Profiler, api->extension_start}, &kApi, 0};
    api->extension_start = &extension.base;
    return bytes;
  }();
  return reinterpret_cast<const PJRT_Api*>(copy.data());
}
