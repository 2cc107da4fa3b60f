// Runs a compiled program: checks, call, and ownership of the arrays afterwards.
#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/runtime/program_impl.h"

namespace md {
namespace {

/// Whether two shardings are equal; trailing replicated dims are ignored.
bool same_sharding(const Sharding& a, const Sharding& b) {
  const size_t n = std::max(a.dims.size(), b.dims.size());
  for (size_t i = 0; i < n; ++i) {
    const bool in_a = i < a.dims.size() && !a.dims[i].empty(), in_b = i < b.dims.size() && !b.dims[i].empty();
    if (in_a != in_b || (in_a && a.dims[i] != b.dims[i])) return false;
  }
  return true;
}

}  // namespace

Program::Program(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Program::Program(Program&&) noexcept = default;
Program::~Program() = default;

const std::vector<std::string>& Program::input_names() const { return impl_->input_names; }
const std::vector<std::string>& Program::output_names() const { return impl_->output_names; }
const Shape& Program::input_shape(size_t i) const { return impl_->inputs.at(i).shape; }
const Sharding& Program::input_sharding(size_t i) const { return impl_->inputs.at(i).sharding; }
const Sharding& Program::output_sharding(size_t i) const { return impl_->outputs.at(i).sharding; }
const CompileReport& Program::report() const { return impl_->report; }

std::optional<MemoryPlan> memory_plan(const pjrt::Compiled& compiled) {
  std::optional<pjrt::MemoryStats> m = compiled.memory();
  if (!m) return {};
  return MemoryPlan{.arguments = m->arguments,
                    .outputs = m->outputs,
                    .aliased = m->aliased,
                    .temporary = m->temporary,
                    .code = m->code,
                    .host = m->host};
}
std::string to_string(const MemoryPlan& plan) {
  constexpr double kGiB = 1 << 30;
  std::string text = fmt::format("memory per device {:.2f} GiB (arguments {:.2f}, temporary {:.2f})",
                                 static_cast<double>(plan.peak()) / kGiB, static_cast<double>(plan.arguments) / kGiB,
                                 static_cast<double>(plan.temporary) / kGiB);
  if (plan.host > 0) text += fmt::format(", {:.2f} GiB of the host", static_cast<double>(plan.host) / kGiB);
  return text;
}

std::optional<MemoryPlan> Program::memory() const { return memory_plan(impl_->executable.compiled()); }
std::optional<double> Program::flops() const { return impl_->executable.compiled().flops(); }
const pjrt::Compiled& Program::compiled() const { return impl_->executable.compiled(); }

std::vector<Array> Program::run(const std::vector<Array*>& inputs) const {
  Span span("run program");
  const Impl& p = *impl_;
  check(inputs.size() == p.inputs.size(), Code::device, "run '{}': {} inputs given, the program expects {}", p.name,
        inputs.size(), p.inputs.size());
  std::vector<std::vector<const pjrt::Buffer*>> buffers(p.shard.size());
  for (auto& b : buffers) b.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Array* a = inputs[i];
    check(a && *a, Code::device, "run '{}': input '{}' is empty (donated to a program, or never filled)", p.name,
          p.input_names[i]);
    if (a->shape() != p.inputs[i].shape)  // format shapes only on failure: there may be thousands
      fail(Code::device, "run '{}': input '{}' is {}, the program expects {}", p.name, p.input_names[i],
           to_string(a->shape()), to_string(p.inputs[i].shape));
    check(a->sharding().order == p.inputs[i].sharding.order, Code::device,
          "run '{}': input '{}' has another memory layout than the program expects", p.name, p.input_names[i]);
    check(a->sharding().in_host_memory == p.inputs[i].sharding.in_host_memory, Code::device,
          "run '{}': input '{}' is not in the memory that the program expects", p.name, p.input_names[i]);
    check(a->shards().size() == p.shard.size() &&
              (p.shard.size() == 1 || same_sharding(a->sharding(), p.inputs[i].sharding)),
          Code::device, "run '{}': input '{}' has another sharding than the program expects", p.name, p.input_names[i]);
    for (size_t d = 0; d < p.shard.size(); ++d) buffers[d].push_back(&a->shards()[p.shard[d]]);
  }
  std::vector<std::vector<pjrt::Buffer>> results;
  try {
    results = p.executable.run(buffers);
  } catch (Error& e) {
    e.note(fmt::format("running '{}'", p.name));
    if (std::optional<MemoryPlan> m = memory(); m && e.code() == Code::out_of_memory)
      e.note(fmt::format("planned bytes per device: {} arguments, {} outputs, {} of them shared, {} temporary",
                         m->arguments, m->outputs, m->aliased, m->temporary));
    throw;
  }
  for (size_t i = 0; i < inputs.size(); ++i)
    if (p.inputs[i].aliased) *inputs[i] = Array();
  std::vector<Array> out;
  out.reserve(p.outputs.size());
  for (size_t o = 0; o < p.outputs.size(); ++o) {
    std::vector<pjrt::Buffer> shards(p.shard.size());
    for (size_t d = 0; d < p.shard.size(); ++d) shards[p.shard[d]] = std::move(results[d][o]);
    out.emplace_back(p.outputs[o].shape, p.outputs[o].sharding, std::move(shards));
  }
  return out;
}

ArrayMap Program::run(ArrayMap& donated, const ArrayMap& retained) const {
  const Impl& p = *impl_;
  std::vector<Array*> inputs;
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    const std::string& name = p.input_names[i];
    if (auto it = donated.find(name); it != donated.end()) {
      inputs.push_back(&it->second);
      continue;
    }
    auto it = retained.find(name);
    check(it != retained.end(), Code::device, "run '{}': input '{}' is not given", p.name, name);
    check(!p.inputs[i].aliased, Code::device,
          "run '{}': input '{}' is aliased to an output; expected among the donated arrays", p.name, name);
    inputs.push_back(const_cast<Array*>(&it->second));  // not aliased, so run() does not change it
  }
  std::vector<Array> results = run(inputs);
  for (size_t i = 0; i < p.inputs.size(); ++i)
    if (p.inputs[i].aliased) donated.erase(p.input_names[i]);
  ArrayMap out;
  for (size_t o = 0; o < results.size(); ++o) out[p.output_names[o]] = std::move(results[o]);
  return out;
}

}  // namespace md
