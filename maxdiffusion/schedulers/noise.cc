// The noise schedule: tables in double on the host, looked up by timestep in the graph.
// Sources: Ho et al. 2020 (linear betas), Nichol and Dhariwal 2021 (squared cosine), Lin et al. 2023 (zero terminal
// SNR), Salimans and Ho 2022 (v prediction), Hang et al. 2023 (min-SNR weights).

#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <numeric>
#include <span>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {
namespace {

double lerp(double a, double b, int64_t i, int64_t n) {
  return n == 1 ? a : a + (b - a) * static_cast<double>(i) / static_cast<double>(n - 1);
}

std::vector<double> make_betas(const nlohmann::json& config, int64_t T) {
  auto betas = field(config, "trained_betas", std::vector<double>{});
  if (!betas.empty()) {
    check(static_cast<int64_t>(betas.size()) == T, Code::invalid_config,
          "scheduler config: trained_betas has {} entries, num_train_timesteps is {}", betas.size(), T);
    return betas;
  }
  const double first = field(config, "beta_start", 1e-4), last = field(config, "beta_end", 0.02);
  const std::string kind = choice(config, "beta_schedule", "linear", {"linear", "scaled_linear", "squaredcos_cap_v2"});
  auto alpha_bar = [](double u) {
    const double c = std::cos((u + 0.008) / 1.008 * std::numbers::pi / 2);
    return c * c;
  };
  for (int64_t i = 0; i < T; ++i) {
    if (kind == "linear") {
      betas.push_back(lerp(first, last, i, T));
    } else if (kind == "scaled_linear") {
      const double root = lerp(std::sqrt(first), std::sqrt(last), i, T);
      betas.push_back(root * root);
    } else {
      const auto u = static_cast<double>(i), n = static_cast<double>(T);
      betas.push_back(std::min(1 - alpha_bar((u + 1) / n) / alpha_bar(u / n), 0.999));
    }
  }
  return betas;
}

/// Shifts and scales √ᾱ so that the last is 0 and the first is unchanged.
void rescale_to_zero_terminal_snr(std::vector<double>& betas, std::vector<double>& abar) {
  const double first = std::sqrt(abar.front()), last = std::sqrt(abar.back());
  double previous = 1;
  for (size_t i = 0; i < abar.size(); ++i) {
    const double root = (std::sqrt(abar[i]) - last) * first / (first - last);
    abar[i] = root * root;
    betas[i] = 1 - abar[i] / previous;
    previous = abar[i];
  }
}

/// table[t] for each sample, shaped [B, 1, …] to multiply x.
Tensor at_timestep(const std::vector<double>& table, Tensor t, int64_t rank) {
  const std::vector<float> values(table.begin(), table.end());
  const Shape shape{DType::f32, {static_cast<int64_t>(values.size())}};
  Tensor row = take(constant(t.graph(), HostArray::of<float>(shape, values)), t);
  Dims dims(static_cast<size_t>(rank), 1);
  dims[0] = t.dim(0);
  return reshape(row, dims);
}

template <class F>
std::vector<double> map_table(const std::vector<double>& in, F f) {
  std::vector<double> out;
  for (double v : in) out.push_back(f(v));
  return out;
}

Tensor signal(const NoiseSchedule& n, Tensor x, Tensor t) {
  return x * at_timestep(map_table(n.alphas_cumprod, [](double a) { return std::sqrt(a); }), t, x.rank());
}
Tensor noise_part(const NoiseSchedule& n, Tensor x, Tensor t) {
  return x * at_timestep(map_table(n.alphas_cumprod, [](double a) { return std::sqrt(1 - a); }), t, x.rank());
}

}  // namespace

NoiseSchedule NoiseSchedule::from_json(const nlohmann::json& config, bool flow) {
  check(config.is_object(), Code::invalid_config, "scheduler config: expected a JSON object, found {}", config.dump());
  NoiseSchedule n;
  n.num_train_timesteps = field<int64_t>(config, "num_train_timesteps", 1000);
  check(n.num_train_timesteps >= 1 && n.num_train_timesteps <= 1'000'000, Code::invalid_config,
        "scheduler config: num_train_timesteps is {}; expected 1 or more, up to a million", n.num_train_timesteps);
  n.prediction_type =
      flow ? choice(config, "prediction_type", "epsilon", {"epsilon", "v_prediction", "sample", "flow_prediction"})
           : choice(config, "prediction_type", "epsilon", {"epsilon", "v_prediction", "sample"});
  n.betas = make_betas(config, n.num_train_timesteps);
  double product = 1;
  for (size_t i = 0; i < n.betas.size(); ++i) {
    check(n.betas[i] > 0 && n.betas[i] < 1, Code::invalid_config,
          "scheduler config: beta {} is {}; expected a value "
          "between 0 and 1",
          i, n.betas[i]);
    n.alphas_cumprod.push_back(product *= 1 - n.betas[i]);
  }
  // Spellings of diffusers and of MaxDiffusion.
  if (field(config, "rescale_betas_zero_snr", false) || field(config, "rescale_zero_terminal_snr", false)) {
    check(n.num_train_timesteps > 1, Code::invalid_config,
          "scheduler config: zero terminal SNR needs more than one training timestep");
    rescale_to_zero_terminal_snr(n.betas, n.alphas_cumprod);
  }
  return n;
}

Tensor add_noise(const NoiseSchedule& n, Tensor x0, Tensor noise, Tensor t) {
  return signal(n, x0, t) + noise_part(n, noise, t);
}

Tensor training_target(const NoiseSchedule& n, Tensor x0, Tensor noise, Tensor t) {
  if (n.prediction_type == "epsilon") return noise;
  if (n.prediction_type == "sample") return x0;
  check(n.prediction_type == "v_prediction", Code::invalid_config, "Unknown prediction type {}", n.prediction_type);
  return signal(n, noise, t) - noise_part(n, x0, t);
}

Tensor snr_weight(const NoiseSchedule& n, Tensor t, double gamma) {
  // The loss in x0 is weighted by min(SNR, γ). An error in ε is 1/SNR of the error in x0, an error in v 1/(SNR + 1) of
  // it.
  const auto weights = map_table(n.alphas_cumprod, [&](double a) {
    if (gamma <= 0) return 1.0;
    const double snr = a / (1 - a), capped = std::min(snr, gamma);
    if (n.prediction_type == "sample") return capped;
    if (n.prediction_type == "v_prediction") return capped / (snr + 1);
    return snr > 0 ? capped / snr : 1.0;
  });
  return at_timestep(weights, t, 1);
}

Tensor value_at_timestep(const std::vector<double>& table, Tensor t) { return at_timestep(table, t, 1); }

TimestepBias TimestepBias::from_map(const std::map<std::string, std::string>& fields) {
  TimestepBias bias;
  for (const auto& [name, text] : fields) {
    const auto value = parse_json(text);
    auto number = [&, &name = name, &text = text] {
      check(value.is_number(), Code::invalid_config, "timestep_bias: {} is {}; expected a number", name, text);
      return value.get<double>();
    };
    if (name == "strategy") {
      check(value.is_string(), Code::invalid_config, "timestep_bias: strategy is {}; expected a text", text);
      bias.strategy = value;
    } else if (name == "multiplier") {
      bias.multiplier = number();
    } else if (name == "portion") {
      bias.portion = number();
    } else if (name == "begin") {
      bias.begin = static_cast<int64_t>(number());
    } else if (name == "end") {
      bias.end = static_cast<int64_t>(number());
    } else {
      fail(Code::invalid_config,
           "timestep_bias: unknown field '{}'; expected one of: strategy, multiplier, portion, begin, end", name);
    }
  }
  return bias;
}

std::vector<double> TimestepBias::weights(int64_t T) const {
  check(portion >= 0 && portion <= 1, Code::invalid_config, "timestep_bias: portion is {}; expected 0 to 1", portion);
  check(multiplier > 0, Code::invalid_config, "timestep_bias: multiplier is {}; expected more than 0", multiplier);
  const auto count = static_cast<int64_t>(portion * static_cast<double>(T));
  int64_t from = 0, to = 0;
  if (strategy == "later") {
    from = T - count, to = T;
  } else if (strategy == "earlier") {
    to = count;
  } else if (strategy == "range") {
    check(begin >= 0 && begin < end && end <= T, Code::invalid_config,
          "timestep_bias: begin {} and end {}; expected 0 <= begin < end <= {}", begin, end, T);
    from = begin, to = end;
  } else {
    check(strategy == "none", Code::invalid_config,
          "timestep_bias: strategy is '{}'; expected one of: none, earlier, later, range", strategy);
  }
  std::vector<double> w(static_cast<size_t>(T), 1.0);
  for (int64_t t = from; t < to; ++t) w[static_cast<size_t>(t)] = multiplier;
  return w;
}

Tensor sample_timesteps(const NoiseSchedule& n, Rng rng, int64_t batch, const TimestepBias& bias, int64_t first,
                        std::optional<int64_t> last) {
  const int64_t end = last.value_or(n.num_train_timesteps);
  if (bias.strategy == "none") return random_integers(rng, {batch}, first, end);
  // Inverse transform sampling: the number of cumulative probabilities at or below a uniform number.
  HostArray ends(Shape{DType::f32, {1, n.num_train_timesteps}});
  std::vector<double> w = bias.weights(n.num_train_timesteps);
  std::fill(w.begin(), w.begin() + first, 0);
  std::fill(w.begin() + end, w.end(), 0);
  const double total = std::accumulate(w.begin(), w.end(), 0.0);
  double sum = 0;
  for (size_t t = 0; t < w.size(); ++t) ends.mutable_view<float>()[t] = static_cast<float>((sum += w[t]) / total);
  Tensor u = random_uniform(rng, {DType::f32, {batch, 1}});
  Tensor t = md::sum(cast(le(constant(u.graph(), ends), u), DType::s32), {1});
  return minimum(t, full_like(t, static_cast<double>(end - 1)));
}

}  // namespace md
