// Compares the attention kernels of a device's platform ($MD_TEST_HARDWARE), with heads of published sizes, with
// dot_product in f32 on this machine's CPU: results and gradients.
#include "maxdiffusion/ops/attention.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/device/host.h"

namespace md {
namespace {

struct Case {
  std::string name, kernel;
  DType type;
  int64_t queries, keys, head;
  bool causal = false;
};
void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

/// y, and the gradients of Σ weight · y with respect to q, k and v.
std::vector<HostArray> run(const Devices& devices, const Case& c, DType type, const std::string& kernel) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Graph g(devices.graph_options());
  std::vector<Tensor> in;
  std::vector<HostArray> values;
  for (const int64_t length : {c.queries, c.keys, c.keys, c.queries}) {
    HostArray a(Shape{DType::f32, {1, length, 2, c.head}});
    for (float& v : a.mutable_view<float>()) v = normal(random);
    values.push_back(a.cast(c.type).cast(type));  // representable in both types
    in.push_back(g.input("x" + std::to_string(in.size()), values.back().shape()));
  }
  AttentionOptions o;
  o.kernel = kernel, o.flash_min_seq_length = 0, o.causal = c.causal;
  const Tensor y = attention(in[0], in[1], in[2], o);
  const Tensor loss = sum(cast(y, DType::f32) * cast(in[3], DType::f32));
  g.output("y", cast(y, DType::f32));
  const std::vector<Tensor> grads = grad(loss, {in[0], in[1], in[2]});
  for (size_t i = 0; i < grads.size(); ++i) g.output("g" + std::to_string(i), cast(grads[i], DType::f32));
  return evaluate(devices, g, values);
}

class AttentionOnDevice : public testing::TestWithParam<Case> {};

TEST_P(AttentionOnDevice, GivesWhatTheCpuGives) {
  const Case& c = GetParam();
  const std::vector<HostArray> device = run(one_device(), c, c.type, c.kernel),
                               host = run(host_device(), c, DType::f32, "dot_product");
  const double outputs = device_distance({device[0]}, {host[0]});
  const double gradients = device_distance({device[1], device[2], device[3]}, {host[1], host[2], host[3]});
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", outputs, c.name, gradients, c.name);
  EXPECT_LE(outputs, 2e-2);
  EXPECT_LE(gradients, 3e-2);
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const char* kernel : {"dot_product", "flash"})
    for (const auto& [its_word, its_type] : {std::pair{"f32", DType::f32}, {"bf16", DType::bf16}}) {
      const auto add = [&, word = its_word, type = its_type](const char* what, int64_t queries, int64_t keys,
                                                             int64_t head, bool causal) {
        out.push_back({fmt::format("{}_{}_{}", kernel, word, what), kernel, type, queries, keys, head, causal});
      };
      add("self64", 1024, 1024, 64, false);
      add("self128", 1024, 1024, 128, false);
      add("text", 1024, 77, 64, false);
      add("causal", 256, 256, 64, true);
    }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionOnDevice, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace md
