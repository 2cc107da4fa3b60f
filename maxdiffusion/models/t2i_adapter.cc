#include "maxdiffusion/models/t2i_adapter.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

struct Block {
  int64_t in = 0, out = 0;
  bool down = false;
};

bool is_light(const T2iAdapterConfig& c) { return c.adapter_type == "light_adapter"; }

/// The blocks by kind of adapter.
std::vector<Block> blocks_of(const T2iAdapterConfig& c) {
  const std::vector<int64_t>& w = c.channels;
  std::vector<Block> blocks;
  if (is_light(c)) {
    blocks.push_back({c.in_channels * c.downscale_factor * c.downscale_factor, w[0]});
    for (size_t i = 1; i < w.size(); ++i) blocks.push_back({w[i - 1], w[i], true});
    blocks.push_back({w.back(), w.back(), true});
    return blocks;
  }
  const bool xl = c.adapter_type == "full_adapter_xl";
  for (size_t i = 0; i < w.size(); ++i)
    blocks.push_back({i == 0 || (xl && i > 2) ? w[i] : w[i - 1], w[i], xl ? i == 2 : i > 0});
  return blocks;
}

/// Cells of `factor`² pixels become channels, channel by channel.   x: [B, H, W, C] → [B, H/f, W/f, C·f²].
Tensor unshuffled(Tensor x, int64_t f) {
  const int64_t b = x.dim(0), h = x.dim(1) / f, w = x.dim(2) / f, c = x.dim(3);
  x = transpose(reshape(x, {b, h, f, w, f, c}), {0, 1, 3, 5, 2, 4});
  return reshape(x, {b, h, w, c * f * f});
}

/// Means of 2×2 cells; at odd sides of what is there.
Tensor halved(Tensor x) {
  auto along = [](Tensor y, int64_t axis) {
    const int64_t n = y.dim(axis);
    auto pairs = [axis](Tensor even) {
      Dims dims = even.dims();
      dims[static_cast<size_t>(axis)] /= 2;
      dims.insert(dims.begin() + axis + 1, 2);
      return mean(reshape(even, dims), {axis + 1});
    };
    if (n % 2 == 0) return pairs(y);
    const Tensor last = slice_axis(y, axis, n - 1, n);
    return n == 1 ? last : concatenate({pairs(slice_axis(y, axis, 0, n - 1)), last}, axis);
  };
  return along(along(x, 1), 2);
}

Tensor pointwise(const Scope& s, Tensor x, int64_t out) {
  return nn::conv2d(s, x, {.out = out, .kernel = 1, .padding = 0});
}

Tensor block(const Scope& s, const T2iAdapterConfig& c, const Block& b, Tensor x) {
  auto path = s.path_scope();
  const bool light = is_light(c);
  const int64_t width = light ? b.out / 4 : b.out;
  if (b.down) x = halved(x);
  if (light || b.in != b.out) x = pointwise(s / "in_conv", x, width);
  for (int64_t i = 0; i < c.num_res_blocks; ++i) {
    const Scope r = s / "resnets" / i;
    const Tensor h = relu(nn::conv2d(r / "block1", x, {.out = width}));
    x = x + (light ? nn::conv2d(r / "block2", h, {.out = width}) : pointwise(r / "block2", h, width));
  }
  return light ? pointwise(s / "out_conv", x, b.out) : x;
}

}  // namespace

int64_t T2iAdapterConfig::multiple() const {
  int64_t m = downscale_factor;
  for (const Block& b : blocks_of(*this)) m *= b.down ? 2 : 1;
  return m;
}

T2iAdapterConfig T2iAdapterConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "T2IAdapter config");
  T2iAdapterConfig c;
  c.adapter_type = r.get("adapter_type", c.adapter_type);
  check(c.adapter_type == "full_adapter" || c.adapter_type == "full_adapter_xl" || is_light(c), Code::invalid_config,
        "{}: 'adapter_type' is '{}', which is not one of: full_adapter, full_adapter_xl, light_adapter", r.what(),
        c.adapter_type);
  c.in_channels = r.get("in_channels", c.in_channels);
  c.num_res_blocks = r.get("num_res_blocks", c.num_res_blocks);
  c.downscale_factor = r.get("downscale_factor", c.downscale_factor);
  c.channels = r.get("channels", c.channels);
  r.finish();
  check(!c.channels.empty() && c.downscale_factor > 0, Code::invalid_config,
        "{}: 'channels' is empty, or 'downscale_factor' is {}", r.what(), c.downscale_factor);
  return c;
}

std::vector<Tensor> t2i_adapter(const Scope& root, const T2iAdapterConfig& c, Tensor image) {
  const Scope s = root / "adapter";
  auto path = s.path_scope();
  Tensor x = unshuffled(cast(image, s.dtype()), c.downscale_factor);
  if (!is_light(c)) x = nn::conv2d(s / "conv_in", x, {.out = c.channels[0]});
  std::vector<Tensor> features;
  for (const Block& b : blocks_of(c)) {
    x = block(s / "body" / static_cast<int64_t>(features.size()), c, b, x);
    features.push_back(x);
  }
  return features;
}

void trace_t2i_adapter(const Scope& s, const T2iAdapterConfig& c) {
  const int64_t side = c.multiple();
  t2i_adapter(s, c, full(s.graph(), 0, {DType::f32, {1, side, side, c.in_channels}}));
}

}  // namespace md
