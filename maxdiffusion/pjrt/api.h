// Internal to pjrt/: calls of the C API. PJRT_CALL sets the struct's size, calls the function, and converts an owned
// PJRT_Error to md::Error naming the call.
#pragma once

#include <pjrt_c_api.h>

#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/dtype.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/pjrt/plugin.h"

namespace md::pjrt {

/// `error` may be null; otherwise it is freed and thrown as device (or out_of_memory) with `call` in the message.
void throw_if(const PJRT_Api* api, PJRT_Error* error, const char* call);
/// The text of an owned error, freed.
std::string take_error_message(const PJRT_Api* api, PJRT_Error* error);

#define PJRT_CALL(api, fn, args) \
  ((args).struct_size = fn##_Args_STRUCT_SIZE, ::md::pjrt::throw_if((api), (api)->fn(&(args)), #fn))

/// For destructors: frees and ignores an error.
#define PJRT_CALL_QUIET(api, fn, args) \
  ((args).struct_size = fn##_Args_STRUCT_SIZE, (void)::md::pjrt::take_error_message((api), (api)->fn(&(args))))

PJRT_Buffer_Type buffer_type(DType t);

/// Options as the C structs that point into them; `options` must outlive the result.
std::vector<PJRT_NamedValue> named_values(const Options& options);
Options from_named_values(const PJRT_NamedValue* values, size_t count);

/// A program to compile; points into `mlir`, which is only read.
PJRT_Program mlir_program(std::string_view mlir);

/// First extension of this type, or null.
const PJRT_Extension_Base* find_extension(const PJRT_Api* api, PJRT_Extension_Type type);

}  // namespace md::pjrt
