// Several kernel calls as one instruction of a program. Each call gets a separate call frame with the arrays that the
// attributes list.
#include <xla/ffi/api/c_api.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "maxdiffusion/kernels/kernels.h"

namespace md {
namespace {

XLA_FFI_Error* refuse(const XLA_FFI_CallFrame* frame, const std::string& what) {
  const std::string text = std::string(kFusedCallsKernel) + ": " + what;
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                 XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Handler* handler_of(std::string_view name) {
  static const auto all = [] {
    std::unordered_map<std::string_view, XLA_FFI_Handler*> handlers;
    for (const Kernel& k : cpu_kernels()) handlers[k.name] = reinterpret_cast<XLA_FFI_Handler*>(k.handler);
    return handlers;
  }();
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

/// The attribute `name` if it has this type, else null.
template <class T>
const T* find(const XLA_FFI_Attrs& all, std::string_view name, XLA_FFI_AttrType type) {
  for (int64_t i = 0; i < all.size; ++i)
    if (all.types[i] == type && std::string_view(all.names[i]->ptr, all.names[i]->len) == name)
      return static_cast<const T*>(all.attrs[i]);
  return nullptr;
}

/// The arrays of one call, in the form of its call frame.
class Arrays {
 public:
  /// Returns false if the numbers do not describe arrays of this instruction.
  bool read(const XLA_FFI_CallFrame& run, const XLA_FFI_Array& numbers) {
    auto* at = static_cast<int64_t*>(numbers.data);
    auto* end = at + numbers.size;
    for (; end - at >= 4; at += 4 + at[3]) {
      const int64_t array = at[0];
      if (array < 0 || array >= run.args.size + run.rets.size || at[3] < 0 || end - at < 4 + at[3]) return false;
      const void* whole = array < run.args.size ? run.args.args[array] : run.rets.rets[array - run.args.size];
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(at[2]),
                          static_cast<char*>(static_cast<const XLA_FFI_Buffer*>(whole)->data) + at[1], at[3], at + 4});
    }
    for (XLA_FFI_Buffer& b : buffers_) addresses_.push_back(&b);
    operand_types_.assign(buffers_.size(), XLA_FFI_ArgType_BUFFER);
    result_types_.assign(buffers_.size(), XLA_FFI_RetType_BUFFER);
    return at == end;
  }
  /// Sets the frame's first `operands` arrays as operands and the others as results.
  void put_into(XLA_FFI_CallFrame& frame, int64_t operands) {
    const auto all = static_cast<int64_t>(buffers_.size());
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands, operand_types_.data(), addresses_.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, all - operands, result_types_.data(),
                  addresses_.data() + operands};
  }
  int64_t size() const { return static_cast<int64_t>(buffers_.size()); }

 private:
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<void*> addresses_;
  std::vector<XLA_FFI_ArgType> operand_types_;
  std::vector<XLA_FFI_RetType> result_types_;
};

XLA_FFI_Error* make_call(const XLA_FFI_CallFrame& run, const XLA_FFI_Attrs& call) {
  const auto* kernel = find<XLA_FFI_ByteSpan>(call, "kernel", XLA_FFI_AttrType_STRING);
  const auto* attributes = find<XLA_FFI_Attrs>(call, "attributes", XLA_FFI_AttrType_DICTIONARY);
  const auto* operands = find<XLA_FFI_Scalar>(call, "operands", XLA_FFI_AttrType_SCALAR);
  const auto* arrays = find<XLA_FFI_Array>(call, "arrays", XLA_FFI_AttrType_ARRAY);
  if (!kernel || !attributes || !operands || !arrays || operands->dtype != XLA_FFI_DataType_S64 ||
      arrays->dtype != XLA_FFI_DataType_S64)
    return refuse(&run, "a call lacks kernel, attributes, operands or arrays");
  const std::string_view name(kernel->ptr, kernel->len);
  XLA_FFI_Handler* handler = handler_of(name);
  if (!handler) return refuse(&run, "there is no kernel '" + std::string(name) + "'");
  Arrays call_arrays;
  const int64_t count = *static_cast<const int64_t*>(operands->value);
  if (!call_arrays.read(run, *arrays) || count < 0 || count > call_arrays.size())
    return refuse(&run, "the arrays of '" + std::string(name) + "' are not among the run's");
  XLA_FFI_CallFrame frame = run;
  call_arrays.put_into(frame, count);
  frame.attrs = *attributes;
  return handler(&frame);
}

XLA_FFI_Error* make_calls(XLA_FFI_CallFrame* frame) {
  // XLA queries the interface version once; any kernel can answer.
  if (frame->extension_start) return handler_of(kProductKernel)(frame);
  for (int64_t i = 0; i < frame->attrs.size; ++i) {
    if (frame->attrs.types[i] != XLA_FFI_AttrType_DICTIONARY) return refuse(frame, "an attribute is not a call");
    if (XLA_FFI_Error* error = make_call(*frame, *static_cast<const XLA_FFI_Attrs*>(frame->attrs.attrs[i])))
      return error;
  }
  return nullptr;
}

}  // namespace

void* run_handler() { return reinterpret_cast<void*>(make_calls); }

}  // namespace md
