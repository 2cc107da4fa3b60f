// The FFI extension of the C API. Its header is not installed. Its layout, as in XLA's pjrt_c_api_ffi_extension.h, is
// three functions after the base: register a type id, add user data, register a handler.
#include "maxdiffusion/pjrt/ffi.h"

#include <cstddef>
#include <cstring>

#include "maxdiffusion/pjrt/api.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

struct RegisterHandlerArgs {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  int traits;
};

/// A plugin with API 0.81 accepted handlers but did not find them when compiling; one with 0.106 calls them.
constexpr int kLastMinorThatForgets = 81;

struct FfiExtension {
  PJRT_Extension_Base base;
  void* register_type_id;
  void* add_user_data;
  PJRT_Error* (*register_handler)(RegisterHandlerArgs* args);
};

}  // namespace

bool supports_ffi_handlers(const Client& client) {
  return find_extension(client.api(), PJRT_Extension_Type_FFI) && client.platform().ffi_platform &&
         client.plugin().api_minor() > kLastMinorThatForgets;
}

void register_ffi_handler(const Client& client, const std::string& name, void* handler) {
  check(supports_ffi_handlers(client), Code::device,
        "custom call '{}': plugin '{}' (API {}.{}) does not support FFI handlers", name, client.plugin().path(),
        client.plugin().api_major(), client.plugin().api_minor());
  const auto* ffi = reinterpret_cast<const FfiExtension*>(find_extension(client.api(), PJRT_Extension_Type_FFI));
  const char* platform = client.platform().ffi_platform;
  RegisterHandlerArgs args{};
  args.struct_size = offsetof(RegisterHandlerArgs, traits) + sizeof(args.traits);
  args.target_name = name.data();
  args.target_name_size = name.size();
  args.handler = handler;
  args.platform_name = platform;
  args.platform_name_size = std::strlen(platform);
  throw_if(client.api(), ffi->register_handler(&args), "PJRT_FFI_Register_Handler");
}

}  // namespace md::pjrt
