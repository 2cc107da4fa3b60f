#include "maxdiffusion/kernels/bf16_product.h"

#include <array>

#include "maxdiffusion/kernels/onednn.h"

namespace md {
namespace {

using dnnl::memory;

struct Code {
  dnnl::matmul run;
  memory::desc a, b, bias, c, scratch;
};

Code compile(const Bf16Product& p) {
  using tag = memory::format_tag;
  constexpr auto kBf16 = memory::data_type::bf16, kF32 = memory::data_type::f32;
  const memory::desc a({p.m, p.k}, kBf16, p.a_transposed ? tag::ba : tag::ab),
      b({p.k, p.n}, kBf16, p.b_transposed ? tag::ba : tag::ab), bias({1, p.n}, kF32, tag::ab),
      c({p.m, p.n}, p.bf16_result ? kBf16 : kF32, tag::ab);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (p.alpha != 1) attributes.set_output_scales(0, {p.alpha});
  if (p.adds) {
    dnnl::post_ops sum;
    sum.append_sum(1);
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc d(p.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c),
                                       attributes, onednn_engine());
  return {dnnl::matmul(d), a, b, bias, c, d.scratchpad_desc()};
}

/// Compiled code with a thread's own memory objects for its arrays: creating these again costs a fifth of a small
/// product.
struct Call {
  explicit Call(const Code& compiled)
      : code(&compiled), a(compiled.a), b(compiled.b), bias(compiled.bias), c(compiled.c), scratch(compiled.scratch) {}
  struct At {
    explicit At(const memory::desc& d) : array(d, onednn_engine(), nullptr) {}
    dnnl_exec_arg_t operator()(int what, const void* data) {
      array.set_data_handle(const_cast<void*>(data));
      return {what, array.get()};
    }
    memory array;
  };
  const Code* code;
  At a, b, bias, c, scratch;
};

}  // namespace

bool multiply(const Bf16Product& p, const uint16_t* a, const uint16_t* b, const float* bias, void* c) noexcept try {
  thread_local std::map<Bf16Product, Call> calls;
  thread_local Scratch work;
  thread_local dnnl::stream stream(onednn_engine());
  use_one_thread();
  auto found = calls.find(p);
  if (found == calls.end()) found = calls.emplace(p, Call(compiled(p, compile))).first;
  Call& call = found->second;
  const std::array arguments = {call.a(DNNL_ARG_SRC, a), call.b(DNNL_ARG_WEIGHTS, b), call.c(DNNL_ARG_DST, c),
                                call.scratch(DNNL_ARG_SCRATCHPAD, work.floats(floats_in(call.code->scratch))),
                                call.bias(DNNL_ARG_BIAS, bias)};
  return dnnl_primitive_execute(call.code->run.get(), stream.get(), static_cast<int>(arguments.size()) - (bias ? 0 : 1),
                                arguments.data()) == dnnl_success;
} catch (const dnnl::error&) {
  return false;
}

}  // namespace md
