#include "maxdiffusion/models/resnet_block.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {

Tensor annotated_conv(const Scope& s, Tensor x, nn::Conv2dOptions o, bool annotated) {
  if (!annotated) o.in_axis = o.out_axis = "";
  Tensor y = nn::conv2d(s, x, o);
  return annotated ? shard(y, {axis::kConvBatch, "", "", axis::kOutChannels}) : y;
}

Tensor resnet_block(const Scope& s, Tensor x, Tensor temb, const ResnetOptions& o) {
  auto path = s.path_scope();
  Tensor h = nn::group_norm(s / "norm1", x, o.groups, o.eps, o.act, o.annotated);
  h = annotated_conv(s / "conv1", h, {.out = o.out}, o.annotated);
  if (temb) h = add_bias(h, nn::linear(s / "time_emb_proj", temb, {.out = o.out}));
  h = nn::group_norm(s / "norm2", h, o.groups, o.eps, o.act, o.annotated);
  h = nn::dropout(s / "dropout", h);
  h = annotated_conv(s / "conv2", h, {.out = o.out}, o.annotated);
  if (x.dim(-1) != o.out)
    x = annotated_conv(s / "conv_shortcut", x, {.out = o.out, .kernel = 1, .padding = 0}, o.annotated);
  h = x + h;
  return o.scale_factor == 1 ? h : h / o.scale_factor;
}

Tensor downsample(const Scope& block, Tensor x, int64_t padding, bool annotated) {
  return annotated_conv(block / "downsamplers.0.conv", x,
                        {.out = x.dim(-1), .stride = 2, .padding = padding, .pad_right_bottom = padding == 0},
                        annotated);
}

Tensor upsample(const Scope& block, Tensor x, int64_t height, int64_t width, bool annotated) {
  const Scope s = block / "upsamplers.0";
  auto path = s.path_scope();
  Tensor y = nn::upsample_nearest(x);
  auto reachable = [](int64_t doubled, int64_t want) { return want == doubled || want == doubled - 1; };
  check(reachable(y.dim(1), height) && reachable(y.dim(2), width), Code::invalid_graph,
        "upsample: {} cannot become {} x {}, at {}", to_string(x.shape()), height, width, s.path());
  // Nearest-neighbour upsampling to 2n − 1 samples is the one to 2n without the last sample.
  if (y.dim(1) != height || y.dim(2) != width) y = slice(y, {0, 0, 0, 0}, {y.dim(0), height, width, y.dim(3)});
  return annotated_conv(s / "conv", y, {.out = x.dim(-1)}, annotated);
}

}  // namespace md
