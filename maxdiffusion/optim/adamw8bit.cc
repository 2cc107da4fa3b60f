// AdamW with 8-bit moments and one scale for each 256 numbers, as bitsandbytes' AdamW8bit. Small parameters have
// float32 moments. Sources: Loshchilov and Hutter 2019; Dettmers et al. 2022, "8-bit Optimizers via Block-wise
// Quantization".

#include <fmt/format.h>

#include <algorithm>

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/eight_bits.h"
#include "maxdiffusion/optim/moments.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct Adamw8bitArgs {
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8, weight_decay = 1e-2, min_8bit_size = 4096;
  template <class V>
  void visit(V&& v) {
    v("betas", betas, "decays of the moments", in_range(0, below(1)));
    v("eps", eps, "added outside the root", at_least(0));
    v("weight_decay", weight_decay, "decoupled weight decay", at_least(0));
    v("min_8bit_size", min_8bit_size, "numbers of a parameter from which on its moments have 8 bits", at_least(1));
  }
};

int64_t layers_of(int64_t stacked) { return std::max<int64_t>(1, stacked); }

class Adamw8bit final : public Optimizer {
 public:
  explicit Adamw8bit(Adamw8bitArgs args) : a_(std::move(args)) {}

  std::vector<StateSlot> slots() const override {
    const auto f32 = [a = a_](const ParamForm& p) -> std::optional<StateArray> {
      if (is_large(a, p)) return std::nullopt;
      return StateArray{{DType::f32, p.dims}, p.axes};
    };
    const auto codes = [a = a_](const ParamForm& p) -> std::optional<StateArray> {
      if (!is_large(a, p)) return std::nullopt;
      return StateArray{{DType::u8, p.dims}, p.axes};
    };
    const auto scales = [a = a_](const ParamForm& p) -> std::optional<StateArray> {
      if (!is_large(a, p)) return std::nullopt;
      return StateArray{{DType::f32, {layers_of(p.stacked), (of_layer(p) + kScaleBlock - 1) / kScaleBlock}}, {"", ""}};
    };
    return {{.prefix = "adamw8bit_m/", .form = codes},        {.prefix = "adamw8bit_v/", .form = codes},
            {.prefix = "adamw8bit_m_scale/", .form = scales}, {.prefix = "adamw8bit_v_scale/", .form = scales},
            {.prefix = "adamw8bit_m_f32/", .form = f32},      {.prefix = "adamw8bit_v_f32/", .form = f32}};
  }

  UpdateRule rule(const StepScalars& s) const override {
    const Tensor correction1 = bias_correction(a_.betas[0], s.updates),
                 correction2 = bias_correction(a_.betas[1], s.updates);
    return [=, a = a_, rate = s.learning_rate](const ParamState& p) {
      const bool small = static_cast<bool>(p.slots[4]);
      const int64_t layers = layers_of(p.stacked);
      const Tensor m0 = small ? p.slots[4] : from_eight_bits({p.slots[0], p.slots[2]}, layers, true);
      const Tensor v0 = small ? p.slots[5] : from_eight_bits({p.slots[1], p.slots[3]}, layers, false);
      const Tensor m = m0 * a.betas[0] + p.gradient * (1 - a.betas[0]);
      const Tensor v = v0 * a.betas[1] + square(p.gradient) * (1 - a.betas[1]);
      Tensor direction = (m / correction1) / (sqrt(v / correction2) + a.eps);
      if (a.weight_decay != 0) direction = direction + p.value * a.weight_decay;
      const Tensor after = p.value - direction * rate;
      if (small) return std::vector<Tensor>{after, {}, {}, {}, {}, m, v};
      const EightBits first = in_eight_bits(m, layers, true), second = in_eight_bits(v, layers, false);
      return std::vector<Tensor>{after, first.codes, second.codes, first.scales, second.scales, {}, {}};
    };
  }

  std::vector<FusedCall> fused(const StepScalars& s, double max_value, Tensor factor) const override {
    const auto call = [&](const char* kernel) {
      return adamw_call(kernel, a_.betas[0], a_.betas[1], a_.eps, a_.weight_decay, s, max_value, factor);
    };
    FusedCall large = call(kAdamw8bitKernel), small = call(kAdamwKernel);
    large.takes = [](const ParamState& p) { return static_cast<bool>(p.slots[0]); };
    large.slots = {0, 1, 2, 3};
    large.whole = true;
    small.takes = [](const ParamState& p) { return static_cast<bool>(p.slots[4]); };
    small.slots = {4, 5};
    return {large, small};
  }

  std::string full_name() const override { return called("bitsandbytes.optim.adamw.AdamW8bit", as_arguments(a_)); }

 private:
  static int64_t of_layer(const ParamForm& p) { return Shape{DType::f32, p.dims}.elements() / layers_of(p.stacked); }
  static bool is_large(const Adamw8bitArgs& a, const ParamForm& p) {
    return static_cast<double>(of_layer(p)) >= a.min_8bit_size;
  }

  Adamw8bitArgs a_;
};

}  // namespace

OptimizerEntry adamw8bit() { return optimizer_with_arguments<Adamw8bit, Adamw8bitArgs>("adamw8bit"); }

}  // namespace md
