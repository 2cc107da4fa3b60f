// Handlers of custom calls: C++ functions that compiled programs call by name (XLA FFI, typed API).
#pragma once

#include <string>

#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {

/// Whether programs of this client can call handlers.
bool supports_ffi_handlers(const Client& client);

/// Makes `handler` (a function made with XLA_FFI_DEFINE_HANDLER, cast to void*) the target of `stablehlo.custom_call
/// @name {api_version = 4}` in programs compiled or loaded later. It stays registered for the life of the process; the
/// same handler may be registered again. Throws device if supports_ffi_handlers() is false.
void register_ffi_handler(const Client& client, const std::string& name, void* handler);

}  // namespace md::pjrt
