#include "maxdiffusion/models/latent_scale.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {
namespace {

double at(const std::vector<double>& values, size_t channel) {
  return values.size() == 1 ? values[0] : values[channel];
}

/// combine(z, values), with one value per channel; a single number if there is only one.
template <class F>
Tensor per_channel(Tensor z, const std::vector<double>& values, F combine) {
  if (values.size() == 1) return combine(z, values[0]);
  const int64_t c = z.dim(-1);
  check(c == static_cast<int64_t>(values.size()), Code::invalid_config, "latents have {} channels, their statistics {}",
        c, values.size());
  const std::vector<float> row(values.begin(), values.end());
  Dims dims(static_cast<size_t>(z.rank()), 1);
  dims.back() = c;
  return combine(z, constant(z.graph(), HostArray::of<float>({DType::f32, dims}, row)));
}

/// Applies f(value, channel) to every element; channels repeat with `period`.
HostArray map_channels(const HostArray& z, size_t period, const std::function<double(double, size_t)>& f) {
  HostArray out(z.shape());
  auto from = z.view<float>();
  auto to = out.mutable_view<float>();
  for (size_t i = 0; i < from.size(); ++i) to[i] = static_cast<float>(f(from[i], i % period));
  return out;
}

size_t channels(const HostArray& z) { return static_cast<size_t>(z.dims().back()); }

}  // namespace

Tensor LatentScale::apply(Tensor z) const {
  z = per_channel(z, shift, [](Tensor x, auto v) { return x - v; });
  return per_channel(z, scale, [](Tensor x, auto v) { return x * v; });
}

Tensor LatentScale::apply_to_deviation(Tensor deviation) const {
  return per_channel(deviation, scale, [](Tensor x, auto v) { return x * v; });
}

HostArray LatentScale::apply(const HostArray& z) const {
  return map_channels(z, channels(z), [this](double v, size_t c) { return (v - at(shift, c)) * at(scale, c); });
}

HostArray LatentScale::undo(const HostArray& z) const {
  return map_channels(z, channels(z), [this](double v, size_t c) { return v / at(scale, c) + at(shift, c); });
}

HostArray LatentScale::apply_to_moments(const HostArray& moments) const {
  const size_t c = channels(moments) / 2;
  return map_channels(moments, 2 * c,
                      [this, c](double v, size_t k) { return (v - (k < c ? at(shift, k) : 0)) * at(scale, k % c); });
}

MeanAndStd mean_and_std(const EachMoments& each) {
  double sum = 0, squares = 0, n = 0;
  each([&](const HostArray& moments) {
    const size_t c = channels(moments) / 2;
    auto v = moments.view<float>();
    for (size_t i = 0; i < v.size(); i += 2 * c)
      for (size_t k = 0; k < c; ++k) {
        const double mean = v[i + k], deviation = v[i + c + k];
        sum += mean, squares += mean * mean + deviation * deviation, n += 1;
      }
  });
  return {sum / n, std::sqrt(std::max(squares / n - (sum / n) * (sum / n), 1e-12))};
}

HostArray sample_latent(const HostArray& moments, const std::function<std::vector<float>(size_t)>& noise) {
  Dims dims = moments.dims();
  const size_t c = channels(moments) / 2;
  dims.back() /= 2;
  HostArray z(batched(1, {DType::f32, dims}));
  auto v = moments.view<float>();
  auto to = z.mutable_view<float>();
  const std::vector<float> normal = noise(to.size());
  for (size_t k = 0; k < to.size(); ++k) {
    const size_t mean = k / c * 2 * c + k % c;
    to[k] = static_cast<float>(v[mean] + static_cast<double>(v[mean + c]) * normal[k]);
  }
  return z;
}

}  // namespace md
