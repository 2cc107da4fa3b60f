#include "maxdiffusion/media/image_processor.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char* kWhat = "preprocessor_config.json";

int64_t pixels(const json& v, const char* key) {
  check(v.is_number_integer() && v > 0 && v < 100'000, Code::invalid_config, "{}: '{}' holds {}; expected pixels",
        kWhat, key, v.dump());
  return v;
}

/// {"height": h, "width": w}.
ImageSize both_sides(const json& v, const char* key) {
  check(v.is_object() && v.contains("height") && v.contains("width"), Code::invalid_config,
        "{}: '{}' is {}; expected a height and a width", kWhat, key, v.dump());
  return {pixels(v["height"], key), pixels(v["width"], key)};
}

Filter filter_of(const json& v) {
  constexpr std::pair<int, Filter> kByNumber[] = {{1, Filter::lanczos}, {2, Filter::bilinear}, {3, Filter::bicubic}};
  for (const auto& [number, filter] : kByNumber)
    if (v == number) return filter;
  fail(Code::invalid_config, "{}: 'resample' is {}, which is not one of: 1 (Lanczos), 2 (bilinear), 3 (bicubic)", kWhat,
       v.dump());
}

/// Sides with about as many pixels, rounded half to even to multiples of `multiple`.
ImageSize within(const ImageProcessor::Area& a, const ImageSize& image) {
  const auto h = static_cast<double>(image.height), w = static_cast<double>(image.width),
             m = static_cast<double>(a.multiple);
  const auto whole = [&](double multiples) { return static_cast<int64_t>(multiples) * a.multiple; };
  ImageSize to{whole(std::nearbyint(h / m)), whole(std::nearbyint(w / m))};
  if (to.height * to.width > a.most) {
    const double shrink = std::sqrt(h * w / static_cast<double>(a.most));
    to = {std::max(a.multiple, whole(std::floor(h / shrink / m))),
          std::max(a.multiple, whole(std::floor(w / shrink / m)))};
  } else if (to.height * to.width < a.least) {
    const double grow = std::sqrt(static_cast<double>(a.least) / (h * w));
    to = {whole(std::ceil(h * grow / m)), whole(std::ceil(w * grow / m))};
  }
  return to;
}

/// Centre crop, padded with zeros. If the difference is odd, crops one more at the end, or pads one more at the start.
HostArray centre(const HostArray& rgb, const ImageSize& size) {
  const auto half = [](int64_t rest) { return rest >= 0 ? rest / 2 : -((1 - rest) / 2); };
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1], top = half(h - size.height), left = half(w - size.width);
  HostArray out(Shape{DType::u8, {size.height, size.width, 3}});
  auto to = out.mutable_view<uint8_t>();
  std::ranges::fill(to, uint8_t{0});
  const auto from = rgb.view<uint8_t>();
  const int64_t first = std::max<int64_t>(0, -left), last = std::min(size.width, w - left);
  for (int64_t y = std::max<int64_t>(0, -top); y < std::min(size.height, h - top); ++y)
    std::copy_n(from.begin() + ((y + top) * w + first + left) * 3, (last - first) * 3,
                to.begin() + (y * size.width + first) * 3);
  return out;
}

}  // namespace

ImageProcessor ImageProcessor::from_json(const json& config) {
  check(config.is_object(), Code::invalid_config, "{}: expected a JSON object, found {}", kWhat, config.type_name());
  ImageProcessor p;
  const auto value_of = [&](const char* key) {
    const auto it = config.find(key);
    return it == config.end() || it->is_null() ? nullptr : &*it;
  };
  const auto flag = [&](const char* key, bool& value) {
    if (const json* v = value_of(key)) {
      check(v->is_boolean(), Code::invalid_config, "{}: '{}' is {}; expected true or false", kWhat, key, v->dump());
      value = *v;
    }
  };
  const auto numbers = [&](const char* key, std::array<double, 3>& values) {
    if (const json* v = value_of(key)) {
      check(v->is_array() && v->size() == 3 && std::ranges::all_of(*v, [](const json& n) { return n.is_number(); }),
            Code::invalid_config, "{}: '{}' is {}; expected a number for each of red, green and blue", kWhat, key,
            v->dump());
      values = v->get<std::array<double, 3>>();
    }
  };
  const auto positive = [&](const json& in, const char* key, int64_t& value) {
    const auto v = in.find(key);
    if (v == in.end() || v->is_null()) return;
    check(v->is_number_integer() && *v > 0, Code::invalid_config, "{}: '{}' is {}; expected a whole number above 0",
          kWhat, key, v->dump());
    value = *v;
  };
  if (value_of("merge_size")) {
    int64_t patch = 14, merge = 2;
    positive(config, "patch_size", patch), positive(config, "merge_size", merge);
    check(patch < 10'000 && merge < 100, Code::invalid_config, "{}: 'patch_size' is {}, 'merge_size' {}; expected less",
          kWhat, patch, merge);
    p.area = {.multiple = patch * merge};
    if (const json* v = value_of("size"); v && v->is_object())
      positive(*v, "shortest_edge", p.area->least), positive(*v, "longest_edge", p.area->most);
    positive(config, "min_pixels", p.area->least), positive(config, "max_pixels", p.area->most);
    check(p.area->least <= p.area->most, Code::invalid_config,
          "{}: at least {} pixels and at most {}; expected no less", kWhat, p.area->least, p.area->most);
    p.do_center_crop = false;
  }
  flag("do_resize", p.do_resize);
  flag("do_center_crop", p.do_center_crop);
  flag("do_rescale", p.do_rescale);
  flag("do_normalize", p.do_normalize);
  if (const json* v = value_of("size"); v && !p.area) {
    const bool edge = v->is_object() && v->contains("shortest_edge") && !v->contains("longest_edge");
    if (v->is_number() || edge) {
      p.shortest_edge = pixels(edge ? (*v)["shortest_edge"] : *v, "size");
    } else {
      p.size = both_sides(*v, "size");
    }
  }
  if (const json* v = value_of("crop_size"))
    p.crop = v->is_number() ? ImageSize{pixels(*v, "crop_size"), pixels(*v, "crop_size")} : both_sides(*v, "crop_size");
  if (const json* v = value_of("resample")) p.filter = filter_of(*v);
  if (const json* v = value_of("rescale_factor")) {
    check(v->is_number(), Code::invalid_config, "{}: 'rescale_factor' is {}; expected a number", kWhat, v->dump());
    p.rescale_factor = *v;
  }
  numbers("image_mean", p.mean);
  numbers("image_std", p.std);
  return p;
}

ImageSize ImageProcessor::resized(const ImageSize& image) const {
  const int64_t h = image.height, w = image.width, edge = shortest_edge;
  if (area) {
    const auto [shorter, longer] = std::minmax(h, w);
    check(longer <= 200 * shorter, Code::invalid_config,
          "an image of {}x{} pixels; expected a side at most 200 times as long as the other", h, w);
    return within(*area, image);
  }
  return size ? *size : w <= h ? ImageSize{edge * h / w, edge} : ImageSize{edge, edge * w / h};
}

HostArray ImageProcessor::apply(const HostArray& rgb) const {
  HostArray image = rgb;
  if (do_resize) {
    const ImageSize to = resized({rgb.dims()[0], rgb.dims()[1]});
    image = resize_rgb8(rgb, to.height, to.width, filter);
  }
  if (do_center_crop) image = centre(image, crop);
  HostArray out(Shape{DType::f32, image.dims()});
  const auto from = image.view<uint8_t>();
  auto to = out.mutable_view<float>();
  for (size_t i = 0; i < to.size(); ++i) {
    to[i] = do_rescale ? static_cast<float>(from[i] * rescale_factor) : static_cast<float>(from[i]);
    if (do_normalize) to[i] = (to[i] - static_cast<float>(mean[i % 3])) / static_cast<float>(std[i % 3]);
  }
  return out;
}

}  // namespace md
