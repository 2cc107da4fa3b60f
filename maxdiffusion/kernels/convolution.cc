// Convolution in two and three dimensions and its gradients on the CPU, through oneDNN. Arrays are channels last,
// weights in PyTorch's layout. Each oneDNN call uses one thread; work is divided among the plugin's threads by images
// (videos), or if these are fewer than threads by frames, or by rows of images (of all frames). For windows of several
// pixels, arrays are copied to and from layouts with blocks of channels: without AVX-512, oneDNN's loops over
// channels-last arrays with long rows are two to six times slower, and the copies cost 1 to 2 %; with AVX-512 see
// plain_layouts(). If bf16 is multiplied as f32, each part is widened and rounded separately.

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/onednn.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/processor.h"
#include "maxdiffusion/kernels/rows.h"

namespace md {
namespace {

namespace ffi = xla::ffi;
using dnnl::memory;

enum class Kind { forward, input_grad, weight_grad };

/// y = conv(x, w): everything that compiled code depends on.
struct Problem {
  Kind kind;
  int64_t batch, depth, height, width, in, out, kernel_d, kernel_h, kernel_w, stride_d, stride_h, stride_w;
  int64_t front, back, top, bottom, left, right;
  // Rows in memory from one frame to the next, if this problem has only some of them; 0 for images of one frame.
  int64_t x_rows = 0, y_rows = 0;
  bool bf16 = false;     // x, w and y are bf16; a gradient of w is f32
  bool widened = false;  // x and y are bf16 and multiplied as f32 copies; w is f32
  bool wide_w = false;   // w is f32 in any case and rounded when reordered
  auto operator<=>(const Problem&) const = default;
  bool flat() const { return depth * kernel_d == 1; }  // two dimensions
  int64_t out_depth() const { return (depth + front + back - kernel_d) / stride_d + 1; }
  int64_t out_height() const { return (height + top + bottom - kernel_h) / stride_h + 1; }
  int64_t out_width() const { return (width + left + right - kernel_w) / stride_w + 1; }
  /// Rows in memory from one frame to the next.
  int64_t x_frame_rows() const { return depth == 1 ? height : x_rows; }
  int64_t y_frame_rows() const { return out_depth() == 1 ? out_height() : y_rows; }
  int64_t x_row() const { return width * in; }
  int64_t y_row() const { return out_width() * out; }
  int64_t weights() const { return out * in * kernel_d * kernel_h * kernel_w; }
  /// Floats of one image.
  int64_t x_image() const { return depth * height * x_row(); }
  int64_t y_image() const { return out_depth() * out_height() * y_row(); }
  int64_t image() const { return x_image() + y_image(); }
};

/// Target size of one oneDNN call's copies of x and y, in floats.
constexpr int64_t kCopied = 1 << 23;

/// A part of a problem: some images, some frames of one, or some rows in all frames of one.
struct Part {
  Problem problem;
  int64_t image, x_row, y_row;  // where it starts
  int64_t keep_from, keep_to;   // rows of x that this part of an input gradient computes; the others are a neighbour's
  int64_t x_frame = 0, y_frame = 0;  // where it starts
  /// Offsets in elements of the whole problem's arrays.
  int64_t x_at(const Problem& p) const { return image * p.x_image() + (x_frame * p.height + x_row) * p.x_row(); }
  int64_t y_at(const Problem& p) const { return image * p.y_image() + (y_frame * p.out_height() + y_row) * p.y_row(); }
};

/// Output frames [first, last) of one image, with the input frames that they depend on.
Part frames(const Problem& p, int64_t image, int64_t first, int64_t last) {
  const int64_t from = first * p.stride_d - p.front, to = (last - 1) * p.stride_d - p.front + p.kernel_d;
  const int64_t begin = std::clamp<int64_t>(from, 0, p.depth), end = std::clamp<int64_t>(to, begin, p.depth);
  Part part{p, image, 0, 0, 0, p.height, begin, first};
  part.problem.batch = 1;
  part.problem.depth = end - begin;
  part.problem.front = begin - from;
  part.problem.back = to - end;
  return part;
}

/// Output rows [first, last) of one image, with the input rows that they depend on.
Part rows(const Problem& p, int64_t image, int64_t first, int64_t last) {
  const int64_t from = first * p.stride_h - p.top, to = (last - 1) * p.stride_h - p.top + p.kernel_h;
  const int64_t begin = std::clamp<int64_t>(from, 0, p.height), end = std::clamp<int64_t>(to, begin, p.height);
  Part part{p, image, begin, first, begin, end};
  part.problem.batch = 1;
  part.problem.height = end - begin;
  part.problem.top = begin - from;
  part.problem.bottom = to - end;
  return part;
}

/// Output rows [first, last) of some frames.
Part rows_of_frames(const Part& whole, int64_t first, int64_t last) {
  Part part = rows(whole.problem, whole.image, first, last);
  part.x_frame = whole.x_frame;
  part.y_frame = whole.y_frame;
  return part;
}

/// Input rows [first, last) of one image, with the output rows that depend on them.
Part rows_of_input(const Problem& p, int64_t image, int64_t first, int64_t last) {
  const int64_t end = std::min((last - 1 + p.top) / p.stride_h + 1, p.out_height());
  const int64_t begin = std::max<int64_t>(first + p.top - p.kernel_h + p.stride_h, 0) / p.stride_h;
  Part part = rows(p, image, std::min(begin, end - 1), end);
  part.keep_from = first;
  part.keep_to = last;
  if (!p.flat()) part.problem.x_rows = part.problem.height;  // copied to separate memory
  return part;
}

/// Whether windows of several pixels use the arrays without copies. With AVX-512, loops over channels-last arrays are
/// as fast as those over blocks, and copies would cost up to 17 % for few channels (measured on one thread, GFLOP/s
/// with and without copies: 3×3, 64 channels, 64×64 pixels 159 and 175; 128 channels, 256×256 pixels 138 and 167,
/// weight gradient 104 and 130; 384 channels, 3×3×3 on 4×32×32 165 and 147).
bool plain_layouts(const Problem& p) {
  constexpr int64_t kFew = 256;
  const bool dense = p.flat() || (p.x_frame_rows() == p.height && p.y_frame_rows() == p.out_height());
  return dense && processor().wide_vectors && std::max(p.in, p.out) <= kFew;
}

/// As many parts as threads, or a multiple if parts would be larger than `most` floats and can be divided.
std::vector<Part> split(const Problem& p, int64_t threads, int64_t most) {
  std::vector<Part> parts;
  const int64_t needed = (p.batch * p.image() - 1) / most + 1;
  const int64_t count = (std::max(needed, threads) + threads - 1) / threads * threads;
  if (p.batch >= count) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = p.batch * i / count, to = p.batch * (i + 1) / count;
      parts.push_back({p, from, 0, 0, 0, p.height});
      parts.back().problem.batch = to - from;
    }
    return parts;
  }
  // Frames are adjacent in memory, rows of several frames are not.
  if (p.batch < threads && p.kind != Kind::input_grad && p.out_depth() >= threads) {
    const int64_t n = std::min((count + p.batch - 1) / p.batch, p.out_depth());
    for (int64_t image = 0; image < p.batch; ++image)
      for (int64_t i = 0; i < n; ++i) {
        const Part part = frames(p, image, p.out_depth() * i / n, p.out_depth() * (i + 1) / n);
        const bool copied = p.widened || !plain_layouts(part.problem);
        const int64_t height = p.out_height(),
                      of_rows = copied ? std::min((part.problem.image() - 1) / most + 1, height) : 1;
        for (int64_t j = 0; j < of_rows; ++j)
          parts.push_back(of_rows == 1 ? part : rows_of_frames(part, height * j / of_rows, height * (j + 1) / of_rows));
      }
    return parts;
  }
  const bool by_input = p.kind == Kind::input_grad;
  const int64_t height = by_input ? p.height : p.out_height();
  const int64_t n = std::min((count + p.batch - 1) / p.batch, height);
  for (int64_t image = 0; image < p.batch; ++image)
    for (int64_t i = 0; i < n; ++i)
      parts.push_back((by_input ? rows_of_input : rows)(p, image, height * i / n, height * (i + 1) / n));
  return parts;
}

dnnl::engine& engine() { return onednn_engine(); }

/// Compiled code of a problem, with the array layouts that it uses.
struct Code {
  struct Operand {
    memory::desc plain, packed;
    dnnl::reorder reorder;  // direction of the copy: results to the plain layout, inputs from it
    bool same() const { return plain == packed; }
  };
  dnnl::primitive run;
  Operand x, w, y;
  memory::desc scratch;
  int64_t channels;  // number of w's output channels per reorder
};

Code::Operand operand(const memory::desc& plain, const memory::desc& packed, bool result) {
  return {plain, packed, dnnl::reorder({engine(), result ? packed : plain, engine(), result ? plain : packed})};
}

/// Output channels [first, first + n) of weights; empty if blocks of their layout also contain other channels.
memory::desc channels(const memory::desc& w, int64_t first, int64_t n) {
  memory::dims dims = w.dims(), from(dims.size());
  dims[0] = n;
  from[0] = first;
  return w.submemory_desc(dims, from, true);
}

Code compile(const Problem& p) {
  const auto type = p.bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  const auto type_w = p.kind == Kind::weight_grad ? memory::data_type::f32 : type;
  constexpr auto kDirect = dnnl::algorithm::convolution_direct;
  constexpr auto kAny = memory::format_tag::any;
  // Axes are given for three dimensions; with one frame the first is dropped.
  auto axes = [&p](memory::dims d, size_t first) {
    if (p.flat()) d.erase(d.begin() + static_cast<std::ptrdiff_t>(first));
    return d;
  };
  const memory::dims stride = axes({p.stride_d, p.stride_h, p.stride_w}, 0), low = axes({p.front, p.top, p.left}, 0),
                     high = axes({p.back, p.bottom, p.right}, 0);
  const memory::dims x_dims = axes({p.batch, p.in, p.depth, p.height, p.width}, 2),
                     w_dims = axes({p.out, p.in, p.kernel_d, p.kernel_h, p.kernel_w}, 2),
                     y_dims = axes({p.batch, p.out, p.out_depth(), p.out_height(), p.out_width()}, 2);
  // Channels last; frames may be further apart than their number of rows.
  auto channels_last = [&](const memory::dims& dims, int64_t frames, int64_t rows, int64_t row, int64_t channels) {
    if (p.flat()) return memory::desc(dims, type, memory::format_tag::nhwc);
    return memory::desc(dims, type, memory::dims{frames * rows * row, 1, rows * row, row, channels});
  };
  const memory::desc plain_x = channels_last(x_dims, p.depth, p.x_frame_rows(), p.x_row(), p.in),
                     plain_y = channels_last(y_dims, p.out_depth(), p.y_frame_rows(), p.y_row(), p.out),
                     plain_w(w_dims, p.wide_w ? memory::data_type::f32 : type_w,
                             p.flat() ? memory::format_tag::oihw : memory::format_tag::oidhw),
                     w(w_dims, type_w, kAny);
  const bool plain = p.kernel_d * p.kernel_h * p.kernel_w == 1 || plain_layouts(p);
  const memory::desc x = plain ? plain_x : memory::desc(x_dims, type, kAny),
                     y = plain ? plain_y : memory::desc(y_dims, type, kAny);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  auto code = [&](const auto& d, auto primitive, const memory::desc& packed_x, const memory::desc& packed_w,
                  const memory::desc& packed_y) -> Code {
    constexpr int64_t kChannels = 64;
    const bool result_w = p.kind == Kind::weight_grad,
               in_groups = !result_w && p.out % kChannels == 0 && !channels(packed_w, 0, kChannels).is_zero();
    Code::Operand of_w = in_groups ? operand(channels(plain_w, 0, kChannels), channels(packed_w, 0, kChannels), false)
                                   : operand(plain_w, packed_w, result_w);
    of_w.plain = plain_w;
    of_w.packed = packed_w;
    return {primitive,
            operand(plain_x, packed_x, p.kind == Kind::input_grad),
            of_w,
            operand(plain_y, packed_y, p.kind == Kind::forward),
            d.scratchpad_desc(),
            in_groups ? kChannels : p.out};
  };
  using Forward = dnnl::convolution_forward;
  using InputGrad = dnnl::convolution_backward_data;
  using WeightGrad = dnnl::convolution_backward_weights;
  const Forward::primitive_desc forward(
      {dnnl::prop_kind::forward_training, kDirect, x, memory::desc(w_dims, type, kAny), y, stride, low, high},
      attributes, engine());
  if (p.kind == Kind::forward)
    return code(forward, Forward(forward), forward.src_desc(), forward.weights_desc(), forward.dst_desc());
  if (p.kind == Kind::input_grad) {
    const InputGrad::primitive_desc d({kDirect, x, w, y, stride, low, high}, attributes, engine(), forward);
    return code(d, InputGrad(d), d.diff_src_desc(), d.weights_desc(), d.diff_dst_desc());
  }
  const WeightGrad::primitive_desc d({kDirect, x, w, y, stride, low, high}, attributes, engine(), forward);
  return code(d, WeightGrad(d), d.src_desc(), d.diff_weights_desc(), d.diff_dst_desc());
}

/// The problem that is computed instead of a widened one: dense f32 arrays.
Problem in_copies(Problem p) {
  p.widened = false;
  if (!p.flat()) p.x_rows = p.height, p.y_rows = p.out_height();
  return p;
}

const Code& code_of(const Problem& p) { return compiled(p.widened ? in_copies(p) : p, compile); }

void reorder(const dnnl::reorder& primitive, const memory::desc& from, void* source, const memory::desc& to,
             void* target) {
  dnnl::stream stream(engine());
  memory a(from, engine(), source), b(to, engine(), target);
  primitive.execute(stream, a, b);
  stream.wait();
}

/// Runs the code: x and y in plain layouts, w in the code's layout.
void execute(const Problem& p, const Code& code, void* x, void* w, void* y) {
  use_one_thread();
  Scratch work, x_copy, y_copy;
  void* packed_x = code.x.same() ? x : x_copy.floats(floats_in(code.x.packed));
  void* packed_y = code.y.same() ? y : y_copy.floats(floats_in(code.y.packed));
  const bool forward = p.kind == Kind::forward, input_grad = p.kind == Kind::input_grad;
  if (!input_grad && packed_x != x) reorder(code.x.reorder, code.x.plain, x, code.x.packed, packed_x);
  if (!forward && packed_y != y) reorder(code.y.reorder, code.y.plain, y, code.y.packed, packed_y);
  dnnl::stream stream(engine());
  std::unordered_map<int, memory> arguments = {
      {DNNL_ARG_SCRATCHPAD, memory(code.scratch, engine(), work.floats(floats_in(code.scratch)))}};
  arguments[input_grad ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC] = memory(code.x.packed, engine(), packed_x);
  arguments[p.kind == Kind::weight_grad ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS] =
      memory(code.w.packed, engine(), w);
  arguments[forward ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST] = memory(code.y.packed, engine(), packed_y);
  code.run.execute(stream, arguments);
  stream.wait();
  if (input_grad && packed_x != x) reorder(code.x.reorder, code.x.packed, packed_x, code.x.plain, x);
  if (forward && packed_y != y) reorder(code.y.reorder, code.y.packed, packed_y, code.y.plain, y);
}

/// Like the above, with x and y in the memory layout of the problem.
void execute_on_arrays(const Problem& p, const Code& code, void* x, void* w, void* y) {
  if (!p.widened) return execute(p, code, x, w, y);
  Scratch x_copy, y_copy;
  struct Copy {
    uint16_t* array;
    int64_t frames, frame, stride;  // in elements: size of a frame, and distance of two frames
    float* floats;
    void read() const { widen(array, frames, frame, stride, floats, frame); }
    void write() const { narrow(floats, frames, frame, frame, array, stride); }
  };
  const Copy of_x{static_cast<uint16_t*>(x), p.batch * p.depth, p.height * p.x_row(), p.x_frame_rows() * p.x_row(),
                  x_copy.floats(p.batch * p.x_image())},
      of_y{static_cast<uint16_t*>(y), p.batch * p.out_depth(), p.out_height() * p.y_row(), p.y_frame_rows() * p.y_row(),
           y_copy.floats(p.batch * p.y_image())};
  if (p.kind != Kind::input_grad) of_x.read();
  if (p.kind != Kind::forward) of_y.read();
  execute(p, code, of_x.floats, w, of_y.floats);
  if (p.kind == Kind::input_grad) of_x.write();
  if (p.kind == Kind::forward) of_y.write();
}

std::vector<const Code*> codes_of(const std::vector<Part>& parts) {
  std::vector<const Code*> codes;
  codes.reserve(parts.size());
  for (const Part& part : parts) codes.push_back(&code_of(part.problem));
  return codes;
}

/// Copies weights from PyTorch's layout to a code's layout.
std::unique_ptr<float[]> laid_out(ffi::ThreadPool& pool, const Code& code, void* w) {
  auto packed = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(floats_in(code.w.packed)));
  const int64_t n = code.channels;
  parallel_for(pool, code.w.packed.dims()[0] / n, [&](int64_t i) {
    use_one_thread();
    auto group = [&](const memory::desc& whole, void* data) {
      const auto size = static_cast<int64_t>(memory::data_type_size(whole.data_type()));
      return static_cast<char*>(data) + channels(whole, i * n, n).data.offset0 * size;
    };
    reorder(code.w.reorder, channels(code.w.plain, 0, n), group(code.w.plain, w), channels(code.w.packed, 0, n),
            group(code.w.packed, packed.get()));
  });
  return packed;
}

/// Output or input gradient; T: type of all arrays. Each part uses the weights in its code's layout, usually one layout
/// for all parts.
template <class T>
void run_images(ffi::ThreadPool& pool, const Problem& p, T* x, T* w, T* y) {
  const std::vector<Part> parts = split(p, std::max<int64_t>(pool.num_threads(), 1), kCopied);
  const std::vector<const Code*> codes = codes_of(parts);
  std::vector<std::pair<const Code*, std::unique_ptr<float[]>>> layouts;
  std::vector<float*> weights;
  for (const Code* code : codes) {
    auto same = std::find_if(layouts.begin(), layouts.end(),
                             [&](const auto& l) { return l.first->w.packed == code->w.packed; });
    if (same == layouts.end()) same = layouts.insert(same, {code, laid_out(pool, *code, w)});
    weights.push_back(same->second.get());
  }
  parallel_for(pool, static_cast<int64_t>(parts.size()), [&](int64_t i) {
    const Part& part = parts[static_cast<size_t>(i)];
    const Problem& part_problem = part.problem;
    const Code& code = *codes[static_cast<size_t>(i)];
    T* y_part = y + part.y_at(p);
    T* image = x + part.image * p.x_image();
    const bool whole = part_problem.height == p.height && part.keep_from == 0 && part.keep_to == p.height;
    if (p.kind == Kind::forward || whole) {
      execute_on_arrays(part_problem, code, x + part.x_at(p), weights[static_cast<size_t>(i)], y_part);
      return;
    }
    // The part's x overlaps its neighbours': only its own rows are stored; rows that no output depends on are zeros.
    Scratch rows;
    T* part_x = reinterpret_cast<T*>(rows.floats(part_problem.x_image()));
    execute_on_arrays(part_problem, code, part_x, weights[static_cast<size_t>(i)], y_part);
    const int64_t from = std::clamp(part.x_row, part.keep_from, part.keep_to);
    const int64_t to = std::clamp(part.x_row + part_problem.height, from, part.keep_to);
    for (int64_t d = 0; d < p.depth; ++d, image += p.height * p.x_row(), part_x += part_problem.height * p.x_row()) {
      std::fill(image + part.keep_from * p.x_row(), image + from * p.x_row(), T{});
      std::copy(part_x + (from - part.x_row) * p.x_row(), part_x + (to - part.x_row) * p.x_row(),
                image + from * p.x_row());
      std::fill(image + to * p.x_row(), image + part.keep_to * p.x_row(), T{});
    }
  });
}

/// Weight gradient, f32: a sum over the parts and, within a part, over groups of images, in fixed order. T: type of x
/// and y.
template <class T>
void run_weights(ffi::ThreadPool& pool, const Problem& p, T* x, float* w, T* y) {
  const std::vector<Part> parts =
      split(p, std::max<int64_t>(pool.num_threads(), 1), std::numeric_limits<int64_t>::max());
  const size_t size = static_cast<size_t>(p.weights());
  auto sums = std::make_unique_for_overwrite<float[]>(size * (parts.size() - 1));
  // Images from `done` on that are processed together.
  auto group = [&](const Part& part, int64_t done) {
    Problem group_problem = part.problem;
    group_problem.batch = std::clamp<int64_t>(kCopied / p.image(), 1, group_problem.batch - done);
    return group_problem;
  };
  for (const Part& part : parts)  // compiles here, where it may throw
    for (int64_t done = 0; done < part.problem.batch; done += group(part, done).batch) code_of(group(part, done));
  parallel_for(pool, static_cast<int64_t>(parts.size()), [&](int64_t i) {
    const Part& part = parts[static_cast<size_t>(i)];
    float* sum = i ? sums.get() + size * static_cast<size_t>(i - 1) : w;
    for (int64_t done = 0; done < part.problem.batch;) {
      const Problem group_problem = group(part, done);
      const Code& code = code_of(group_problem);
      Scratch gradient, plain;
      float* packed_w = gradient.floats(floats_in(code.w.packed));
      execute_on_arrays(group_problem, code, x + part.x_at(p) + done * p.x_image(), packed_w,
                        y + part.y_at(p) + done * p.y_image());
      float* to = done ? plain.floats(p.weights()) : sum;
      reorder(code.w.reorder, code.w.packed, packed_w, code.w.plain, to);
      if (done)
        for (size_t j = 0; j < size; ++j) sum[j] += to[j];
      done += group_problem.batch;
    }
  });
  constexpr size_t kChunk = 1 << 15;
  parallel_for(pool, static_cast<int64_t>((size + kChunk - 1) / kChunk), [&](int64_t chunk) {
    const size_t from = static_cast<size_t>(chunk) * kChunk, to = std::min(size, from + kChunk);
    for (size_t k = 0; k + 1 < parts.size(); ++k)
      for (size_t j = from; j < to; ++j) w[j] += sums[k * size + j];
  });
}

/// Converts bf16 weights to f32.
std::unique_ptr<float[]> widened(ffi::ThreadPool& pool, const uint16_t* w, int64_t n) {
  constexpr int64_t kChunk = 1 << 16;
  auto wide = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(n));
  parallel_for(pool, (n + kChunk - 1) / kChunk, [&](int64_t i) {
    const int64_t from = i * kChunk;
    widen(w + from, 1, std::min(kChunk, n - from), 0, wide.get() + from, 0);
  });
  return wide;
}

/// T: type of the operands.
template <Kind kKind, class T>
void run(ffi::ThreadPool& pool, const Problem& p, void* x, void* w, void* y) {
  auto as = [](void* data) { return static_cast<T*>(data); };
  if constexpr (kKind == Kind::weight_grad)
    run_weights(pool, p, as(x), static_cast<float*>(w), as(y));
  else
    run_images(pool, p, as(x), as(w), as(y));
}

template <Kind kKind>
ffi::Error convolution_kernel(ffi::ThreadPool pool, ffi::AnyBuffer first, ffi::AnyBuffer second,
                              ffi::Result<ffi::AnyBuffer> result, ffi::Span<const int64_t> window, bool in_bf16) {
  Span span("convolution");
  struct Array {
    ffi::Span<const int64_t> dims;
    void* data;
  };
  const auto type = first.element_type();
  const bool wide_w = kKind != Kind::weight_grad && type == ffi::BF16 && second.element_type() == ffi::F32;
  if ((type != ffi::F32 && type != ffi::BF16) || (second.element_type() != type && !wide_w) ||
      result->element_type() != (kKind == Kind::weight_grad ? ffi::F32 : type))
    return ffi::Error::InvalidArgument("md_convolution: operands are not all f32 or all bf16");
  const Array a{first.dimensions(), first.untyped_data()}, b{second.dimensions(), second.untyped_data()},
      c{result->dimensions(), result->untyped_data()};
  const Array& x = kKind == Kind::input_grad ? c : a;
  const Array& w = kKind == Kind::weight_grad ? c : b;
  const Array& y = kKind == Kind::forward ? c : kKind == Kind::input_grad ? a : b;
  const size_t axes = window.size() / 3;
  if ((axes != 2 && axes != 3) || window.size() != 3 * axes || x.dims.size() != axes + 2 || w.dims.size() != axes + 2 ||
      y.dims.size() != axes + 2)
    return ffi::Error::InvalidArgument("md_convolution: x, w, y and window are not of two or three axes");
  // Sizes along an axis, counted from the last axis.
  struct Line {
    int64_t x = 1, kernel = 1, y = 1, stride = 1, low = 0, high = 0;
  };
  auto line = [&](size_t from_last) -> Line {
    if (from_last > axes) return {};
    const size_t i = axes - from_last;
    return {x.dims[i + 1], w.dims[i + 2], y.dims[i + 1], window[i], window[axes + 2 * i], window[axes + 2 * i + 1]};
  };
  Line d = line(3), h = line(2), v = line(1);
  int64_t batch = x.dims[0], y_batch = y.dims[0];
  if (d.kernel == 1 && d.stride == 1 && d.low + d.high == 0) {  // frames are processed as images
    batch *= d.x, y_batch *= d.y;
    d = {};
  }
  Problem p{kKind,    batch,    d.x,      h.x,      v.x,      x.dims[axes + 1], w.dims[0],
            d.kernel, h.kernel, v.kernel, d.stride, h.stride, v.stride,         d.low,
            d.high,   h.low,    h.high,   v.low,    v.high};
  if (!p.flat()) p.x_rows = h.x, p.y_rows = h.y;
  p.widened = type == ffi::BF16 && !in_bf16;
  p.bf16 = type == ffi::BF16 && in_bf16;
  p.wide_w = wide_w && in_bf16;
  if (y_batch != batch || d.y != p.out_depth() || h.y != p.out_height() || v.y != p.out_width() ||
      y.dims[axes + 1] != p.out || w.dims[1] != p.in)
    return ffi::Error::InvalidArgument("md_convolution: sizes of x, w and y do not agree");
  try {
    std::unique_ptr<float[]> weights;
    if (p.widened && kKind != Kind::weight_grad && !wide_w)
      weights = widened(pool, static_cast<uint16_t*>(w.data), p.weights());
    (type == ffi::BF16 ? run<kKind, uint16_t> : run<kKind, float>)(pool, p, x.data, weights ? weights.get() : w.data,
                                                                   y.data);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("md_convolution: ") + e.what());
  }
  return ffi::Error::Success();
}

auto bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<ffi::Span<const int64_t>>("window")
      .Attr<bool>("in_bf16");
}
XLA_FFI_DEFINE_HANDLER(kForward, convolution_kernel<Kind::forward>, bind());
XLA_FFI_DEFINE_HANDLER(kInputGrad, convolution_kernel<Kind::input_grad>, bind());
XLA_FFI_DEFINE_HANDLER(kWeightGrad, convolution_kernel<Kind::weight_grad>, bind());

}  // namespace

void* convolution_handler() { return reinterpret_cast<void*>(kForward); }
void* convolution_input_grad_handler() { return reinterpret_cast<void*>(kInputGrad); }
void* convolution_weight_grad_handler() { return reinterpret_cast<void*>(kWeightGrad); }

}  // namespace md
