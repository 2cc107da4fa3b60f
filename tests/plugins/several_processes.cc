// The CPU plugin with a client of several processes, as GPUs' have one: each process tells the others through the
// key-value callbacks how many devices it has, and the client is there when all have been heard. MD_TEST_HEARD names a
// file that gets what was heard, one line for each process: its number and its devices. "MD_TEST_TIMEOUT" is how many
// ms a process waits for another.
#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace {

const PJRT_Api* real = nullptr;

/// What a callback refuses with. The real plugin's errors are its own; so this one's are told apart by address.
struct Refusal {
  std::string message;
} refusal;
PJRT_Error* refuse(PJRT_Error_Code, const char* message, size_t size) {
  refusal.message.assign(message, size);
  return reinterpret_cast<PJRT_Error*>(&refusal);
}
bool ours(const PJRT_Error* error) { return error == reinterpret_cast<const PJRT_Error*>(&refusal); }
void message(PJRT_Error_Message_Args* a) {
  if (!ours(a->error)) return real->PJRT_Error_Message(a);
  a->message = refusal.message.data();
  a->message_size = refusal.message.size();
}
void destroy(PJRT_Error_Destroy_Args* a) {
  if (!ours(a->error)) real->PJRT_Error_Destroy(a);
}
PJRT_Error* code(PJRT_Error_GetCode_Args* a) {
  if (!ours(a->error)) return real->PJRT_Error_GetCode(a);
  a->code = PJRT_Error_Code_DEADLINE_EXCEEDED;
  return nullptr;
}

const PJRT_NamedValue* option(const PJRT_Client_Create_Args* a, const std::string& name) {
  for (size_t i = 0; i < a->num_options; ++i)
    if (name == std::string(a->create_options[i].name, a->create_options[i].name_size)) return &a->create_options[i];
  return nullptr;
}

PJRT_Error* put(PJRT_Client_Create_Args* a, const std::string& key, const std::string& value) {
  PJRT_CallbackError callback_error = refuse;
  PJRT_KeyValuePutCallback_Args args{};
  args.struct_size = PJRT_KeyValuePutCallback_Args_STRUCT_SIZE;
  args.key = key.data(), args.key_size = key.size();
  args.value = value.data(), args.value_size = value.size();
  args.callback_error = &callback_error;
  args.user_arg = a->kv_put_user_arg;
  return a->kv_put_callback(&args);
}

template <class Args>
std::string taken(const Args& args) {
  std::string value(args.value, args.value_size);
  args.value_deleter_callback(args.value);
  return value;
}

PJRT_Error* get(PJRT_Client_Create_Args* a, const std::string& key, std::string& value) {
  const char* timeout = std::getenv("MD_TEST_TIMEOUT");
  PJRT_CallbackError callback_error = refuse;
  PJRT_KeyValueGetCallback_Args args{};
  args.struct_size = PJRT_KeyValueGetCallback_Args_STRUCT_SIZE;
  args.key = key.data(), args.key_size = key.size();
  args.timeout_in_ms = timeout ? std::atoi(timeout) : 60'000;
  args.callback_error = &callback_error;
  args.user_arg = a->kv_get_user_arg;
  PJRT_Error* error = a->kv_get_callback(&args);
  if (!error) value = taken(args);
  return error;
}

PJRT_Error* create(PJRT_Client_Create_Args* a) {
  const PJRT_NamedValue *node = option(a, "node_id"), *nodes = option(a, "num_nodes");
  if (node && nodes && a->kv_put_callback) {
    const int64_t me = node->int64_value, all = nodes->int64_value;
    const PJRT_NamedValue* visible = option(a, "visible_devices");
    const std::string mine =
        visible ? std::to_string(visible->int64_array_value[0]) + "/" + std::to_string(visible->value_size) : "all";
    if (PJRT_Error* e = put(a, "local_topology/" + std::to_string(me), mine)) return e;
    // What nobody has put is not there, which is no error of the store.
    PJRT_CallbackError callback_error = refuse;
    PJRT_KeyValueTryGetCallback_Args absent{};
    absent.struct_size = PJRT_KeyValueTryGetCallback_Args_STRUCT_SIZE;
    absent.key = "absent", absent.key_size = 6;
    absent.callback_error = &callback_error;
    absent.user_arg = a->kv_try_get_user_arg;
    if (!a->kv_try_get_callback(&absent)) return refuse(PJRT_Error_Code_INTERNAL, "absent is there", 15);
    std::ofstream heard(std::getenv("MD_TEST_HEARD"));
    for (int64_t p = 0; p < all; ++p) {
      std::string value;
      if (PJRT_Error* e = get(a, "local_topology/" + std::to_string(p), value)) return e;
      heard << p << " " << value << "\n";
    }
  }
  PJRT_Client_Create_Args alone = *a;
  alone.num_options = 0;
  PJRT_Error* error = real->PJRT_Client_Create(&alone);
  a->client = alone.client;
  return error;
}

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  static std::vector<char> copy = [] {
    void* library = dlopen(MD_DEPS_DIR "/fastatomstruct_xla_cpu/libpjrt_cpu.so", RTLD_NOW | RTLD_LOCAL);
    real = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
    std::vector<char> bytes(reinterpret_cast<const char*>(real),
                            reinterpret_cast<const char*>(real) + real->struct_size);  // newer than this header
    auto* api = reinterpret_cast<PJRT_Api*>(bytes.data());
    api->PJRT_Client_Create = create;
    api->PJRT_Error_Message = message;
    api->PJRT_Error_Destroy = destroy;
    api->PJRT_Error_GetCode = code;
    return bytes;
  }();
  return reinterpret_cast<const PJRT_Api*>(copy.data());
}
