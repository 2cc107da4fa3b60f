// Compiling, loading and running programs.
#include "maxdiffusion/pjrt/executable.h"

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {

Compiled::Compiled(Compiled&& o) noexcept : api_(o.api_), handle_(std::exchange(o.handle_, nullptr)) {}

Compiled& Compiled::operator=(Compiled&& o) noexcept {
  std::swap(api_, o.api_);
  std::swap(handle_, o.handle_);
  return *this;
}

Compiled::~Compiled() {
  if (!handle_) return;
  PJRT_Executable_Destroy_Args args{};
  args.executable = static_cast<PJRT_Executable*>(handle_);
  PJRT_CALL_QUIET(api_, PJRT_Executable_Destroy, args);
}

std::string Compiled::serialize() const {
  PJRT_Executable_Serialize_Args args{};
  args.executable = static_cast<const PJRT_Executable*>(handle_);
  PJRT_CALL(api_, PJRT_Executable_Serialize, args);
  std::string bytes(args.serialized_bytes, args.serialized_bytes_size);
  args.serialized_executable_deleter(args.serialized_executable);
  return bytes;
}

std::optional<MemoryStats> Compiled::memory() const {
  PJRT_Executable_GetCompiledMemoryStats_Args args{};
  args.struct_size = PJRT_Executable_GetCompiledMemoryStats_Args_STRUCT_SIZE;
  args.executable = static_cast<PJRT_Executable*>(handle_);
  if (PJRT_Error* error = api_->PJRT_Executable_GetCompiledMemoryStats(&args)) {  // optional in the API
    take_error_message(api_, error);
    return {};
  }
  return MemoryStats{.arguments = args.argument_size_in_bytes,
                     .outputs = args.output_size_in_bytes,
                     .aliased = args.alias_size_in_bytes,
                     .temporary = args.temp_size_in_bytes,
                     .code = args.generated_code_size_in_bytes,
                     .host = args.host_temp_size_in_bytes + args.host_argument_size_in_bytes};
}

std::optional<double> Compiled::cost(const char* property) const {
  PJRT_Executable_GetCostAnalysis_Args args{};
  args.struct_size = PJRT_Executable_GetCostAnalysis_Args_STRUCT_SIZE;
  args.executable = static_cast<PJRT_Executable*>(handle_);
  if (PJRT_Error* error = api_->PJRT_Executable_GetCostAnalysis(&args)) {  // optional in the API
    take_error_message(api_, error);
    return {};
  }
  const Options properties = from_named_values(args.properties, args.num_properties);
  auto it = properties.find(property);
  if (it == properties.end()) return {};
  if (auto* f = std::get_if<float>(&it->second)) return *f;
  if (auto* i = std::get_if<int64_t>(&it->second)) return static_cast<double>(*i);
  return {};
}

std::optional<Operations> Compiled::operations() const {
  PJRT_Program program{};
  program.struct_size = PJRT_Program_STRUCT_SIZE;
  PJRT_Executable_OptimizedProgram_Args args{};
  args.struct_size = PJRT_Executable_OptimizedProgram_Args_STRUCT_SIZE;
  args.executable = static_cast<PJRT_Executable*>(handle_);
  args.program = &program;
  if (PJRT_Error* error = api_->PJRT_Executable_OptimizedProgram(&args)) {  // optional in the API
    take_error_message(api_, error);
    return {};
  }
  std::string bytes(program.code_size, '\0');
  program.code = bytes.data();
  PJRT_CALL(api_, PJRT_Executable_OptimizedProgram, args);
  return read_operations(bytes, {program.format, program.format_size});
}

size_t Compiled::output_count() const {
  PJRT_Executable_NumOutputs_Args args{};
  args.executable = static_cast<PJRT_Executable*>(handle_);
  PJRT_CALL(api_, PJRT_Executable_NumOutputs, args);
  return args.num_outputs;
}

/// State with which a run waits for the previous one.
struct LastRun {
  std::mutex mutex;
  std::vector<Event> over;

  void wait() {
    std::vector<Event> events;
    {
      std::lock_guard lock(mutex);
      events.swap(over);
    }
    for (const Event& e : events) {
      try {
        e.wait();
      } catch (const Error&) {  // its results report the error
      }
    }
    // The plugin's thread frees the memory just after signalling completion: this yields the core to it.
    if (!events.empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  void set(std::vector<Event> events) {
    std::lock_guard lock(mutex);
    over = std::move(events);
  }
};

namespace {

void* executable_of(const Client& client, void* loaded) {
  PJRT_LoadedExecutable_GetExecutable_Args args{};
  args.loaded_executable = static_cast<PJRT_LoadedExecutable*>(loaded);
  PJRT_CALL(client.api(), PJRT_LoadedExecutable_GetExecutable, args);
  return args.executable;
}

}  // namespace

Executable::Executable(const Client& client, void* handle)
    : client_(&client), handle_(handle), compiled_(client.api(), executable_of(client, handle)) {
  PJRT_LoadedExecutable_AddressableDevices_Args args{};
  args.executable = static_cast<PJRT_LoadedExecutable*>(handle_);
  PJRT_CALL(client.api(), PJRT_LoadedExecutable_AddressableDevices, args);
  for (size_t i = 0; i < args.num_addressable_devices; ++i)
    for (const Device& d : client.devices())
      if (d.handle == args.addressable_devices[i]) device_ids_.push_back(d.id);
  outputs_ = compiled_.output_count();
  if (client.platform().memory_is_the_hosts) last_run_ = std::make_unique<LastRun>();
}

Executable Executable::compile(const Client& client, std::string_view mlir, const CompileOptions& options) {
  const PJRT_Program program = mlir_program(mlir);
  const std::string bytes = options.serialize();
  PJRT_Client_Compile_Args args{};
  args.client = static_cast<PJRT_Client*>(client.handle());
  args.program = &program;
  args.compile_options = bytes.data();
  args.compile_options_size = bytes.size();
  PJRT_CALL(client.api(), PJRT_Client_Compile, args);
  return Executable(client, args.executable);
}

Executable Executable::load(const Client& client, std::string_view bytes) {
  PJRT_Executable_DeserializeAndLoad_Args args{};
  args.client = static_cast<PJRT_Client*>(client.handle());
  args.serialized_executable = bytes.data();
  args.serialized_executable_size = bytes.size();
  PJRT_CALL(client.api(), PJRT_Executable_DeserializeAndLoad, args);
  return Executable(client, args.loaded_executable);
}

Executable::Executable(Executable&& o) noexcept
    : client_(o.client_),
      handle_(std::exchange(o.handle_, nullptr)),
      compiled_(std::move(o.compiled_)),
      device_ids_(std::move(o.device_ids_)),
      outputs_(o.outputs_),
      last_run_(std::move(o.last_run_)) {}

Executable& Executable::operator=(Executable&& o) noexcept {
  std::swap(client_, o.client_);
  std::swap(handle_, o.handle_);
  std::swap(compiled_, o.compiled_);
  std::swap(device_ids_, o.device_ids_);
  std::swap(outputs_, o.outputs_);
  std::swap(last_run_, o.last_run_);
  return *this;
}

Executable::~Executable() {
  if (!handle_) return;
  PJRT_LoadedExecutable_Destroy_Args args{};
  args.executable = static_cast<PJRT_LoadedExecutable*>(handle_);
  PJRT_CALL_QUIET(client_->api(), PJRT_LoadedExecutable_Destroy, args);
}

std::vector<std::vector<Buffer>> Executable::run(const std::vector<std::vector<const Buffer*>>& inputs) const {
  const size_t devices = device_ids_.size(), count = inputs.empty() ? 0 : inputs[0].size();
  check(inputs.size() == devices, Code::internal, "run: inputs for {} devices, the program runs on {}", inputs.size(),
        devices);
  std::vector<PJRT_Buffer*> arguments(devices * count), results(devices * outputs_);
  std::vector<PJRT_Buffer* const*> argument_lists(devices);
  std::vector<PJRT_Buffer**> result_lists(devices);
  for (size_t d = 0; d < devices; ++d) {
    for (size_t i = 0; i < count; ++i) arguments[d * count + i] = static_cast<PJRT_Buffer*>(inputs[d][i]->handle_);
    argument_lists[d] = arguments.data() + d * count;
    result_lists[d] = results.data() + d * outputs_;
  }
  PJRT_ExecuteOptions options{};
  options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  PJRT_LoadedExecutable_Execute_Args args{};
  args.executable = static_cast<PJRT_LoadedExecutable*>(handle_);
  args.options = &options;
  args.argument_lists = argument_lists.data();
  args.num_devices = devices;
  args.num_args = count;
  args.output_lists = result_lists.data();
  std::vector<PJRT_Event*> complete(devices);
  args.device_complete_events = complete.data();
  if (last_run_) last_run_->wait();
  try {
    PJRT_CALL(client_->api(), PJRT_LoadedExecutable_Execute, args);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {  // some failures of the CUDA plugin's operations
    fail(Code::device, "plugin '{}' threw '{}' while it ran the program\n  try: other algorithms, by xla_flags",
         client_->plugin().path(), e.what());
  }
  std::vector<Event> over;
  for (PJRT_Event* event : complete) over.emplace_back(client_->api(), event).keep_alive(client_->track());
  if (last_run_) last_run_->set(std::move(over));
  std::vector<std::vector<Buffer>> out(devices);
  for (size_t d = 0; d < devices; ++d)
    for (size_t i = 0; i < outputs_; ++i) out[d].push_back(Buffer(client_, results[d * outputs_ + i]));
  return out;
}

}  // namespace md::pjrt
