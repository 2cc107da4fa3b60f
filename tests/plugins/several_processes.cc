// The CPU plugin with a multi-process client like those of GPUs and TPUs. Each process publishes its number of devices
// through the key-value callbacks; the client exists once all processes have done so. It lists the devices of all
// processes, but a process can only run work on its own.
//
// Every process runs programs on the devices of all processes: before each run the processes exchange the arguments on
// their own devices. Results on other processes' devices are kept hidden with those on its own devices. So a process
// computes what it would with a real plugin, as long as all processes make the same calls in the same order.
//
// MD_TEST_HEARD: a file that receives one line per process: its number and its devices. MD_TEST_COMPILED: a file that
// receives one line per compiled program: the process number and "module @NAME". MD_TEST_TIMEOUT: milliseconds that a
// process waits for another.
#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

const PJRT_Api* real = nullptr;

/// Error from a callback. Errors of the real plugin belong to it, so these are recognized by their address.
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

/// The callbacks passed to the client's constructor.
struct Callbacks {
  PJRT_KeyValueGetCallback get = nullptr;
  PJRT_KeyValueTryGetCallback try_get = nullptr;
  PJRT_KeyValuePutCallback put = nullptr;
  void *get_arg = nullptr, *try_get_arg = nullptr, *put_arg = nullptr;
} callbacks;

PJRT_Error* put(const std::string& key, const std::string& value) {
  PJRT_CallbackError callback_error = refuse;
  PJRT_KeyValuePutCallback_Args args{};
  args.struct_size = PJRT_KeyValuePutCallback_Args_STRUCT_SIZE;
  args.key = key.data(), args.key_size = key.size();
  args.value = value.data(), args.value_size = value.size();
  args.callback_error = &callback_error;
  args.user_arg = callbacks.put_arg;
  return callbacks.put(&args);
}

PJRT_Error* get(const std::string& key, std::string& value) {
  const char* timeout = std::getenv("MD_TEST_TIMEOUT");
  PJRT_CallbackError callback_error = refuse;
  PJRT_KeyValueGetCallback_Args args{};
  args.struct_size = PJRT_KeyValueGetCallback_Args_STRUCT_SIZE;
  args.key = key.data(), args.key_size = key.size();
  args.timeout_in_ms = timeout ? std::atoi(timeout) : 60'000;
  args.callback_error = &callback_error;
  args.user_arg = callbacks.get_arg;
  if (PJRT_Error* error = callbacks.get(&args)) return error;
  value.assign(args.value, args.value_size);
  args.value_deleter_callback(args.value);
  return nullptr;
}

/// A missing key is reported as absent, not as an error of the store.
PJRT_Error* expect_absent(const std::string& key) {
  PJRT_CallbackError callback_error = refuse;
  PJRT_KeyValueTryGetCallback_Args absent{};
  absent.struct_size = PJRT_KeyValueTryGetCallback_Args_STRUCT_SIZE;
  absent.key = key.data(), absent.key_size = key.size();
  absent.callback_error = &callback_error;
  absent.user_arg = callbacks.try_get_arg;
  return callbacks.try_get(&absent) ? nullptr : refuse(PJRT_Error_Code_INTERNAL, "absent is there", 15);
}

PJRT_Client* the_client = nullptr;
int64_t me = 0;
std::vector<int64_t> owners;  // process of each device, by id; empty: single-process client

template <class Args>
Args sized(size_t size) {
  Args args{};
  args.struct_size = size;
  return args;
}

int id_of(PJRT_Device* device) {
  auto description = sized<PJRT_Device_GetDescription_Args>(PJRT_Device_GetDescription_Args_STRUCT_SIZE);
  description.device = device;
  real->PJRT_Device_GetDescription(&description);
  auto id = sized<PJRT_DeviceDescription_Id_Args>(PJRT_DeviceDescription_Id_Args_STRUCT_SIZE);
  id.device_description = description.device_description;
  real->PJRT_DeviceDescription_Id(&id);
  return id.id;
}
int64_t owner_of(PJRT_Device* device) { return owners.empty() ? me : owners.at(static_cast<size_t>(id_of(device))); }

PJRT_Error* create(PJRT_Client_Create_Args* a) {
  const PJRT_NamedValue *node = option(a, "node_id"), *nodes = option(a, "num_nodes");
  PJRT_Client_Create_Args args = *a;
  args.num_options = 0;
  PJRT_NamedValue count{};
  owners.clear();
  me = 0;
  if (node && nodes && a->kv_put_callback) {
    callbacks = {a->kv_get_callback, a->kv_try_get_callback, a->kv_put_callback,
                 a->kv_get_user_arg, a->kv_try_get_user_arg, a->kv_put_user_arg};
    me = node->int64_value;
    const PJRT_NamedValue* visible = option(a, "visible_devices");
    const int64_t mine = visible ? static_cast<int64_t>(visible->value_size) : 1;
    const std::string reported =
        visible ? std::to_string(visible->int64_array_value[0]) + "/" + std::to_string(mine) : "all/1";
    if (PJRT_Error* e = put("local_topology/" + std::to_string(me), reported)) return e;
    if (PJRT_Error* e = expect_absent("absent")) return e;
    std::string heard;
    for (int64_t p = 0; p < nodes->int64_value; ++p) {
      std::string value;
      if (PJRT_Error* e = get("local_topology/" + std::to_string(p), value)) return e;
      heard += std::to_string(p) + " " + value + "\n";
      owners.insert(owners.end(), std::stoul(value.substr(value.find('/') + 1)), p);
    }
    if (const char* file = std::getenv("MD_TEST_HEARD")) std::ofstream(file) << heard;
    count.struct_size = PJRT_NamedValue_STRUCT_SIZE;
    count.name = "cpu_device_count", count.name_size = 16;
    count.type = PJRT_NamedValue_kInt64;
    count.int64_value = static_cast<int64_t>(owners.size());
    count.value_size = 1;
    args.create_options = &count;
    args.num_options = 1;
  }
  PJRT_Error* error = real->PJRT_Client_Create(&args);
  a->client = the_client = args.client;
  return error;
}

PJRT_Error* process_index(PJRT_Client_ProcessIndex_Args* a) {
  a->process_index = static_cast<int>(me);
  return nullptr;
}

PJRT_Error* process_of_description(PJRT_DeviceDescription_ProcessIndex_Args* a) {
  if (owners.empty()) return real->PJRT_DeviceDescription_ProcessIndex(a);
  auto id = sized<PJRT_DeviceDescription_Id_Args>(PJRT_DeviceDescription_Id_Args_STRUCT_SIZE);
  id.device_description = a->device_description;
  real->PJRT_DeviceDescription_Id(&id);
  a->process_index = static_cast<int>(owners.at(static_cast<size_t>(id.id)));
  return nullptr;
}

PJRT_Error* is_addressable(PJRT_Device_IsAddressable_Args* a) {
  a->is_addressable = owner_of(a->device) == me;
  return nullptr;
}

std::mutex mutex;  // guards the variables below
std::map<PJRT_LoadedExecutable*, std::vector<PJRT_Device*>> devices_of_executable;
/// For a buffer on this process's first device of a program: the buffers on other processes' devices, in order.
std::map<PJRT_Buffer*, std::vector<PJRT_Buffer*>> hidden;
int64_t joint_runs = 0;

/// The executable's devices in all processes.
std::vector<PJRT_Device*> devices_of(PJRT_LoadedExecutable* executable) {
  auto all =
      sized<PJRT_LoadedExecutable_AddressableDevices_Args>(PJRT_LoadedExecutable_AddressableDevices_Args_STRUCT_SIZE);
  all.executable = executable;
  real->PJRT_LoadedExecutable_AddressableDevices(&all);
  return {all.addressable_devices, all.addressable_devices + all.num_addressable_devices};
}

PJRT_Error* addressable_devices(PJRT_LoadedExecutable_AddressableDevices_Args* a) {
  std::vector<PJRT_Device*> addressable = devices_of(a->executable);
  std::erase_if(addressable, [](PJRT_Device* d) { return owner_of(d) != me; });
  const std::lock_guard lock(mutex);
  std::vector<PJRT_Device*>& stored = devices_of_executable[a->executable] = std::move(addressable);
  a->addressable_devices = stored.data();
  a->num_addressable_devices = stored.size();
  return nullptr;
}

PJRT_Error* from_host(PJRT_Client_BufferFromHostBuffer_Args* a) {
  if (owner_of(a->device) != me) return refuse(PJRT_Error_Code_INTERNAL, "a transfer to another process's device", 39);
  return real->PJRT_Client_BufferFromHostBuffer(a);
}

void await_and_destroy(PJRT_Event* event) {
  auto wait = sized<PJRT_Event_Await_Args>(PJRT_Event_Await_Args_STRUCT_SIZE);
  wait.event = event;
  real->PJRT_Event_Await(&wait);
  auto destroy = sized<PJRT_Event_Destroy_Args>(PJRT_Event_Destroy_Args_STRUCT_SIZE);
  destroy.event = event;
  real->PJRT_Event_Destroy(&destroy);
}

std::string bytes_of(PJRT_Buffer* buffer) {
  auto copy = sized<PJRT_Buffer_ToHostBuffer_Args>(PJRT_Buffer_ToHostBuffer_Args_STRUCT_SIZE);
  copy.src = buffer;
  real->PJRT_Buffer_ToHostBuffer(&copy);
  std::string bytes(copy.dst_size, '\0');
  copy.dst = bytes.data();
  real->PJRT_Buffer_ToHostBuffer(&copy);
  await_and_destroy(copy.event);
  return bytes;
}

/// Creates a buffer with the shape of `like` on another device.
PJRT_Buffer* put_on(PJRT_Client* client, PJRT_Device* device, PJRT_Buffer* like, const std::string& bytes) {
  auto dims = sized<PJRT_Buffer_Dimensions_Args>(PJRT_Buffer_Dimensions_Args_STRUCT_SIZE);
  dims.buffer = like;
  real->PJRT_Buffer_Dimensions(&dims);
  auto type = sized<PJRT_Buffer_ElementType_Args>(PJRT_Buffer_ElementType_Args_STRUCT_SIZE);
  type.buffer = like;
  real->PJRT_Buffer_ElementType(&type);
  auto from = sized<PJRT_Client_BufferFromHostBuffer_Args>(PJRT_Client_BufferFromHostBuffer_Args_STRUCT_SIZE);
  from.client = client;
  from.data = bytes.data();
  from.type = type.type;
  from.dims = dims.dims;
  from.num_dims = dims.num_dims;
  from.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  from.device = device;
  if (real->PJRT_Client_BufferFromHostBuffer(&from)) return nullptr;
  await_and_destroy(from.done_with_host_buffer);
  return from.buffer;
}

/// Publishes this process's buffers for one argument and creates those of the other processes in `theirs`.
PJRT_Error* ask_for(const std::string& key, const std::vector<PJRT_Device*>& devices,
                    const std::vector<PJRT_Buffer*>& local, std::vector<PJRT_Buffer*>& theirs) {
  size_t next = 0;
  for (PJRT_Device* d : devices)
    if (owner_of(d) == me)
      if (PJRT_Error* e = put(key + std::to_string(id_of(d)), bytes_of(local[next++]))) return e;
  for (PJRT_Device* d : devices) {
    if (owner_of(d) == me) continue;
    std::string bytes;
    if (PJRT_Error* e = get(key + std::to_string(id_of(d)), bytes)) return e;
    theirs.push_back(put_on(the_client, d, local[0], bytes));
    if (!theirs.back()) return refuse(PJRT_Error_Code_INTERNAL, "no buffer", 9);
  }
  return nullptr;
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* a) {
  const std::vector<PJRT_Device*> devices = devices_of(a->executable);
  if (a->num_devices == devices.size()) return real->PJRT_LoadedExecutable_Execute(a);
  const std::lock_guard lock(mutex);
  const std::string run = "run/" + std::to_string(joint_runs++) + "/";
  std::vector<std::vector<PJRT_Buffer*>> arguments(devices.size(), std::vector<PJRT_Buffer*>(a->num_args));
  for (size_t i = 0; i < a->num_args; ++i) {
    std::vector<PJRT_Buffer*> local;
    for (size_t d = 0; d < a->num_devices; ++d) local.push_back(a->argument_lists[d][i]);
    std::vector<PJRT_Buffer*>& theirs = hidden[local[0]];
    if (theirs.empty())
      if (PJRT_Error* e = ask_for(run + std::to_string(i) + "/", devices, local, theirs)) return e;
    size_t next_own = 0, next_of_others = 0;
    for (size_t d = 0; d < devices.size(); ++d)
      arguments[d][i] = owner_of(devices[d]) == me ? local[next_own++] : theirs[next_of_others++];
  }
  auto program = sized<PJRT_LoadedExecutable_GetExecutable_Args>(PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE);
  program.loaded_executable = a->executable;
  real->PJRT_LoadedExecutable_GetExecutable(&program);
  auto outputs = sized<PJRT_Executable_NumOutputs_Args>(PJRT_Executable_NumOutputs_Args_STRUCT_SIZE);
  outputs.executable = program.executable;
  real->PJRT_Executable_NumOutputs(&outputs);
  auto done = sized<PJRT_Executable_Destroy_Args>(PJRT_Executable_Destroy_Args_STRUCT_SIZE);
  done.executable = program.executable;
  real->PJRT_Executable_Destroy(&done);

  std::vector<std::vector<PJRT_Buffer*>> results(devices.size(), std::vector<PJRT_Buffer*>(outputs.num_outputs));
  std::vector<PJRT_Buffer* const*> argument_lists;
  std::vector<PJRT_Buffer**> result_lists;
  for (size_t d = 0; d < devices.size(); ++d) {
    argument_lists.push_back(arguments[d].data());
    result_lists.push_back(results[d].data());
  }
  std::vector<PJRT_Event*> events(devices.size());
  PJRT_LoadedExecutable_Execute_Args all = *a;
  all.argument_lists = argument_lists.data();
  all.output_lists = result_lists.data();
  all.num_devices = devices.size();
  all.device_complete_events = events.data();
  if (PJRT_Error* e = real->PJRT_LoadedExecutable_Execute(&all)) return e;
  size_t next_own = 0;
  std::vector<size_t> others;
  for (size_t d = 0; d < devices.size(); ++d) {
    if (owner_of(devices[d]) != me) {
      others.push_back(d);
      await_and_destroy(events[d]);
      continue;
    }
    std::copy(results[d].begin(), results[d].end(), a->output_lists[next_own]);
    if (a->device_complete_events) a->device_complete_events[next_own] = events[d];
    ++next_own;
  }
  for (size_t o = 0; o < outputs.num_outputs; ++o)
    for (size_t d : others) hidden[a->output_lists[0][o]].push_back(results[d][o]);
  return nullptr;
}

PJRT_Error* compile(PJRT_Client_Compile_Args* a) {
  if (const char* file = std::getenv("MD_TEST_COMPILED")) {
    const std::string text(a->program->code, a->program->code_size);
    std::ofstream(file, std::ios::app) << me << " " << text.substr(0, text.find(' ', text.find('@'))) << "\n";
  }
  return real->PJRT_Client_Compile(a);
}

PJRT_Error* destroy_buffer(PJRT_Buffer_Destroy_Args* a) {
  {
    const std::lock_guard lock(mutex);
    if (const auto found = hidden.extract(a->buffer))
      for (PJRT_Buffer* b : found.mapped()) {
        auto destroy = sized<PJRT_Buffer_Destroy_Args>(PJRT_Buffer_Destroy_Args_STRUCT_SIZE);
        destroy.buffer = b;
        real->PJRT_Buffer_Destroy(&destroy);
      }
  }
  return real->PJRT_Buffer_Destroy(a);
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
    api->PJRT_Client_Compile = compile;
    api->PJRT_Client_ProcessIndex = process_index;
    api->PJRT_DeviceDescription_ProcessIndex = process_of_description;
    api->PJRT_Device_IsAddressable = is_addressable;
    api->PJRT_LoadedExecutable_AddressableDevices = addressable_devices;
    api->PJRT_Client_BufferFromHostBuffer = from_host;
    api->PJRT_LoadedExecutable_Execute = execute;
    api->PJRT_Buffer_Destroy = destroy_buffer;
    api->PJRT_Error_Message = message;
    api->PJRT_Error_Destroy = destroy;
    api->PJRT_Error_GetCode = code;
    return bytes;
  }();
  return reinterpret_cast<const PJRT_Api*>(copy.data());
}
