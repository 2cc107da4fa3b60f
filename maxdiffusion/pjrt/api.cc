// Conversion of C API errors, named values and element types.
#include "maxdiffusion/pjrt/api.h"

#include <cstring>
#include <type_traits>

namespace md::pjrt {
namespace {

const char* code_name(PJRT_Error_Code code) {
  switch (code) {
    case PJRT_Error_Code_OK: return "OK";
    case PJRT_Error_Code_CANCELLED: return "CANCELLED";
    case PJRT_Error_Code_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case PJRT_Error_Code_DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case PJRT_Error_Code_NOT_FOUND: return "NOT_FOUND";
    case PJRT_Error_Code_ALREADY_EXISTS: return "ALREADY_EXISTS";
    case PJRT_Error_Code_PERMISSION_DENIED: return "PERMISSION_DENIED";
    case PJRT_Error_Code_RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
    case PJRT_Error_Code_FAILED_PRECONDITION: return "FAILED_PRECONDITION";
    case PJRT_Error_Code_ABORTED: return "ABORTED";
    case PJRT_Error_Code_OUT_OF_RANGE: return "OUT_OF_RANGE";
    case PJRT_Error_Code_UNIMPLEMENTED: return "UNIMPLEMENTED";
    case PJRT_Error_Code_INTERNAL: return "INTERNAL";
    case PJRT_Error_Code_UNAVAILABLE: return "UNAVAILABLE";
    case PJRT_Error_Code_DATA_LOSS: return "DATA_LOSS";
    case PJRT_Error_Code_UNAUTHENTICATED: return "UNAUTHENTICATED";
    default: return "UNKNOWN";
  }
}

}  // namespace

std::string take_error_message(const PJRT_Api* api, PJRT_Error* error) {
  if (!error) return {};
  PJRT_Error_Message_Args text{};
  text.struct_size = PJRT_Error_Message_Args_STRUCT_SIZE;
  text.error = error;
  api->PJRT_Error_Message(&text);
  std::string message(text.message, text.message_size);
  PJRT_Error_Destroy_Args destroy{};
  destroy.struct_size = PJRT_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  api->PJRT_Error_Destroy(&destroy);
  return message;
}

void throw_if(const PJRT_Api* api, PJRT_Error* error, const char* call) {
  if (!error) [[likely]]
    return;
  PJRT_Error_GetCode_Args args{};
  args.struct_size = PJRT_Error_GetCode_Args_STRUCT_SIZE;
  args.error = error;
  if (PJRT_Error* second = api->PJRT_Error_GetCode(&args)) {
    take_error_message(api, second);
    args.code = PJRT_Error_Code_UNKNOWN;
  }
  const Code code = args.code == PJRT_Error_Code_RESOURCE_EXHAUSTED ? Code::out_of_memory : Code::device;
  fail(code, "{}: {}: {}", call, code_name(args.code), take_error_message(api, error));
}

PJRT_Buffer_Type buffer_type(DType t) {
  switch (t) {
    case DType::pred: return PJRT_Buffer_Type_PRED;
    case DType::s8: return PJRT_Buffer_Type_S8;
    case DType::s16: return PJRT_Buffer_Type_S16;
    case DType::s32: return PJRT_Buffer_Type_S32;
    case DType::s64: return PJRT_Buffer_Type_S64;
    case DType::u8: return PJRT_Buffer_Type_U8;
    case DType::u16: return PJRT_Buffer_Type_U16;
    case DType::u32: return PJRT_Buffer_Type_U32;
    case DType::u64: return PJRT_Buffer_Type_U64;
    case DType::f8e4m3fn: return PJRT_Buffer_Type_F8E4M3FN;
    case DType::f8e5m2: return PJRT_Buffer_Type_F8E5M2;
    case DType::bf16: return PJRT_Buffer_Type_BF16;
    case DType::f16: return PJRT_Buffer_Type_F16;
    case DType::f32: return PJRT_Buffer_Type_F32;
    case DType::f64: return PJRT_Buffer_Type_F64;
  }
  fail(Code::internal, "no PJRT element type for {}", static_cast<int>(t));
}

std::vector<PJRT_NamedValue> named_values(const Options& options) {
  std::vector<PJRT_NamedValue> out;
  for (const auto& [name, value] : options) {
    PJRT_NamedValue v{};
    v.struct_size = PJRT_NamedValue_STRUCT_SIZE;
    v.name = name.data();
    v.name_size = name.size();
    v.value_size = 1;
    std::visit(
        [&](const auto& x) {
          using T = std::decay_t<decltype(x)>;
          if constexpr (std::is_same_v<T, std::string>) {
            v.type = PJRT_NamedValue_kString;
            v.string_value = x.data();
            v.value_size = x.size();
          } else if constexpr (std::is_same_v<T, int64_t>) {
            v.type = PJRT_NamedValue_kInt64;
            v.int64_value = x;
          } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
            v.type = PJRT_NamedValue_kInt64List;
            v.int64_array_value = x.data();
            v.value_size = x.size();
          } else if constexpr (std::is_same_v<T, float>) {
            v.type = PJRT_NamedValue_kFloat;
            v.float_value = x;
          } else {
            v.type = PJRT_NamedValue_kBool;
            v.bool_value = x;
          }
        },
        value);
    out.push_back(v);
  }
  return out;
}

Options from_named_values(const PJRT_NamedValue* values, size_t count) {
  Options out;
  for (size_t i = 0; i < count; ++i) {
    const PJRT_NamedValue& v = values[i];
    std::string name(v.name, v.name_size);
    switch (v.type) {
      case PJRT_NamedValue_kString: out[name] = std::string(v.string_value, v.value_size); break;
      case PJRT_NamedValue_kInt64: out[name] = v.int64_value; break;
      case PJRT_NamedValue_kInt64List:
        out[name] = std::vector<int64_t>(v.int64_array_value, v.int64_array_value + v.value_size);
        break;
      case PJRT_NamedValue_kFloat: out[name] = v.float_value; break;
      case PJRT_NamedValue_kBool: out[name] = v.bool_value; break;
    }
  }
  return out;
}

PJRT_Program mlir_program(std::string_view mlir) {
  constexpr static std::string_view format = "mlir";
  PJRT_Program program{};
  program.struct_size = PJRT_Program_STRUCT_SIZE;
  program.code = const_cast<char*>(mlir.data());
  program.code_size = mlir.size();
  program.format = format.data();
  program.format_size = format.size();
  return program;
}

const PJRT_Extension_Base* find_extension(const PJRT_Api* api, PJRT_Extension_Type type) {
  for (const PJRT_Extension_Base* e = api->extension_start; e; e = e->next) {
    int found;  // a newer plugin may have types that this header's enum lacks
    static_assert(sizeof(found) == sizeof(e->type));
    std::memcpy(&found, &e->type, sizeof(found));
    if (found == static_cast<int>(type)) return e;
  }
  return nullptr;
}

}  // namespace md::pjrt
