#include "maxdiffusion/checkpoint/gguf.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

constexpr std::string_view kMagic = "GGUF", kPacking = "#gguf", kOriginalShape = "comfy.gguf.orig_shape.";
constexpr uint64_t kAlignment = 32, kMostAlignment = 1 << 20, kMostAxes = 8;

[[noreturn]] void refuse_gguf(const std::string& file, const std::string& what) {
  throw Error(Code::io, fmt::format("read '{}': {}", file, what))
      .note("try: fetch or write the file again; it is damaged or is not a GGUF file");
}

enum class Kind : uint32_t { u8, s8, u16, s16, u32, s32, f32, boolean, text, list, u64, s64, f64 };
constexpr uint32_t kKinds = 13;

/// Reads the header from front to back.
class GgufCursor {
 public:
  GgufCursor(const std::string& file, const MappedFile& m) : file_(file), m_(m) {}

  std::string_view bytes(uint64_t n, const std::string& what) {
    if (n > m_.size - at_)
      refuse_gguf(file_,
                  fmt::format("truncated: {} of {} bytes at byte {}, but the file has {}", what, n, at_, m_.size));
    const std::string_view found(reinterpret_cast<const char*>(m_.data) + at_, n);
    at_ += n;
    return found;
  }
  template <class T>
  T number(const std::string& what) {
    T value{};
    std::memcpy(&value, bytes(sizeof value, what).data(), sizeof value);
    return value;
  }
  std::string text(const std::string& what) {
    return std::string(bytes(number<uint64_t>("the length of " + what), what));
  }
  /// A count of items that take at least `least` bytes each.
  uint64_t count(const std::string& what, uint64_t least) {
    const auto n = number<uint64_t>("the number of " + what);
    if (n > (m_.size - at_) / least)
      refuse_gguf(file_, fmt::format("{} {} are more than a file of {} bytes can hold", n, what, m_.size));
    return n;
  }
  uint64_t place() const { return at_; }

 private:
  const std::string& file_;
  const MappedFile& m_;
  uint64_t at_ = 0;
};

struct Value {
  std::string text;               // value of a text or number
  std::vector<int64_t> integers;  // values of a list of integers
  uint64_t whole = 0;             // value of an integer
};

class HeaderReader {
 public:
  HeaderReader(const std::string& file, GgufCursor& cursor) : file_(file), c_(cursor) {}

  Value value(const std::string& key, Kind kind, bool in_list = false) {
    switch (kind) {
      case Kind::u8: return number<uint8_t>(key);
      case Kind::s8: return number<int8_t>(key);
      case Kind::u16: return number<uint16_t>(key);
      case Kind::s16: return number<int16_t>(key);
      case Kind::u32: return number<uint32_t>(key);
      case Kind::s32: return number<int32_t>(key);
      case Kind::f32: return number<float>(key);
      case Kind::boolean: return number<uint8_t>(key);
      case Kind::u64: return number<uint64_t>(key);
      case Kind::s64: return number<int64_t>(key);
      case Kind::f64: return number<double>(key);
      case Kind::text: return {.text = c_.text(key)};
      case Kind::list: {
        if (in_list) refuse_gguf(file_, fmt::format("'{}' is a list of lists", key));
        const Kind of = this->kind(key);
        const uint64_t n = c_.count("values of " + key, 1);
        Value list;
        for (uint64_t i = 0; i < n; ++i)
          if (const Value v = value(key, of, true); of != Kind::text && n <= kMostAxes)
            list.integers.push_back(static_cast<int64_t>(v.whole));
        return list;
      }
    }
    return {};
  }
  Kind kind(const std::string& key) {
    const auto kind = c_.number<uint32_t>("the type of " + key);
    if (kind >= kKinds) refuse_gguf(file_, fmt::format("'{}' is of the unknown type {}", key, kind));
    return static_cast<Kind>(kind);
  }

 private:
  template <class T>
  Value number(const std::string& key) {
    const T v = c_.number<T>(key);
    if constexpr (std::is_floating_point_v<T>)
      return {.text = fmt::format("{}", v)};
    else
      return {.text = fmt::format("{}", v), .integers = {}, .whole = static_cast<uint64_t>(v)};
  }
  const std::string& file_;
  GgufCursor& c_;
};

struct GgufEntry {
  std::string name;
  Dims dims;
  const GgufType* type = nullptr;
  uint64_t begin = 0, bytes = 0;
};

GgufEntry read_entry(const std::string& file, GgufCursor& c, uint64_t alignment) {
  GgufEntry e{.name = c.text("a tensor's name")};
  const auto axes = c.number<uint32_t>("the rank of " + e.name);
  if (axes > kMostAxes)
    refuse_gguf(file, fmt::format("tensor '{}' has {} axes; expected at most {}", e.name, axes, kMostAxes));
  uint64_t elements = 1;
  for (uint32_t i = 0; i < axes; ++i) {
    const auto n = c.number<uint64_t>("a size of " + e.name);
    if (n > INT64_MAX || __builtin_mul_overflow(elements, n, &elements) || elements > INT64_MAX / 8)
      refuse_gguf(file, fmt::format("tensor '{}': its sizes do not fit into memory", e.name));
    e.dims.insert(e.dims.begin(), static_cast<int64_t>(n));  // in GGUF the first size varies fastest
  }
  const auto id = c.number<uint32_t>("the type of " + e.name);
  e.begin = c.number<uint64_t>("the place of " + e.name);
  e.type = find_gguf_type(id);
  if (!e.type || (!e.type->plain && !e.type->read))
    throw Error(Code::io, fmt::format("read '{}': tensor '{}' is {}, which is not supported; expected one of: {}", file,
                                      e.name, e.type ? std::string(e.type->name) : fmt::format("of ggml's type {}", id),
                                      fmt::join(gguf_type_names(), ", ")))
        .note("try: a file of the same model in Q4_K, Q5_K, Q6_K or Q8_0");
  const auto block = static_cast<uint64_t>(e.type->numbers);
  const int64_t row = e.dims.empty() ? 1 : e.dims.back();
  if (static_cast<uint64_t>(row) % block != 0)
    refuse_gguf(file, fmt::format("tensor '{}': rows of {} numbers are not whole blocks of {} ({})", e.name, row, block,
                                  e.type->name));
  e.bytes = elements / block * static_cast<uint64_t>(e.type->bytes);
  if (e.begin % alignment != 0)
    refuse_gguf(
        file, fmt::format("tensor '{}' begins at byte {}, which is not a multiple of {}", e.name, e.begin, alignment));
  return e;
}

void check_gguf_layout(const std::string& file, const std::vector<GgufEntry>& entries, uint64_t data_bytes) {
  std::vector<const GgufEntry*> order;
  for (const GgufEntry& e : entries) order.push_back(&e);
  std::ranges::stable_sort(order, {}, [](const GgufEntry* e) { return std::pair(e->begin, e->bytes); });
  uint64_t at = 0;
  const GgufEntry* before = nullptr;
  for (const GgufEntry* e : order) {
    if (e->begin > data_bytes || e->bytes > data_bytes - e->begin)
      refuse_gguf(file, fmt::format("truncated: tensor '{}' has {} bytes at byte {} of the data, but the file holds {}",
                                    e->name, e->bytes, e->begin, data_bytes));
    if (e->begin < at)
      refuse_gguf(file, fmt::format("tensor '{}' at byte {} overlaps '{}', which ends at {}", e->name, e->begin,
                                    before->name, at));
    at = e->begin + e->bytes;
    before = e;
  }
}

/// The sizes that the tensor had before the writer flattened it, from the metadata.
Dims original_dims(const std::string& file, const GgufEntry& e, const std::vector<int64_t>& original) {
  int64_t elements = 1, found = 1;
  for (const int64_t n : e.dims) found *= n;
  for (const int64_t n : original)
    if (n <= 0 || __builtin_mul_overflow(elements, n, &elements)) elements = -1;
  if (elements != found)
    refuse_gguf(file, fmt::format("{}{} is [{}], but the tensor has {} numbers", kOriginalShape, e.name,
                                  fmt::join(original, ", "), found));
  return original;
}

}  // namespace

std::string packing_of(const std::string& tensor) { return tensor + std::string(kPacking); }
bool is_packing(const std::string& name) { return name.ends_with(kPacking); }
GgufPacking read_packing(const HostArray& packing) {
  const auto v = packing.view<int64_t>();
  return {find_gguf_type(static_cast<uint32_t>(v[0])), Dims(v.begin() + 1, v.end())};
}

bool is_gguf(const MappedFile& file) {
  return file.size >= kMagic.size() && std::memcmp(file.data, kMagic.data(), kMagic.size()) == 0;
}

GgufContent read_gguf(const std::string& name, const MappedFile& m) {
  GgufCursor c(name, m);
  c.bytes(kMagic.size(), "the beginning");
  const auto version = c.number<uint32_t>("the version");
  if (version != 2 && version != 3) {
    Error error(Code::io, fmt::format("read '{}': GGUF of version {}; expected 2 or 3{}", name, version,
                                      version != 0 && version % 65536 == 0 ? " (its numbers are big-endian)" : ""));
    throw error.note("try: convert the file again with today's llama.cpp or ComfyUI-GGUF, which write version 3");
  }
  const uint64_t tensors = c.count("tensors", 24), values = c.count("values", 13);
  GgufContent out;
  std::map<std::string, std::vector<int64_t>> shapes;
  uint64_t alignment = kAlignment;
  HeaderReader header(name, c);
  for (uint64_t i = 0; i < values; ++i) {
    const std::string key = c.text("a key");
    const Kind kind = header.kind(key);
    Value v = header.value(key, kind);
    if (key == "general.alignment") alignment = v.whole;
    if (key.starts_with(kOriginalShape)) shapes[key.substr(kOriginalShape.size())] = v.integers;
    if (kind != Kind::list) out.metadata[key] = std::move(v.text);
  }
  if (alignment < 8 || alignment > kMostAlignment || alignment % 8 != 0)
    refuse_gguf(name, fmt::format("general.alignment is {}; expected a multiple of 8", alignment));
  std::vector<GgufEntry> entries;
  for (uint64_t i = 0; i < tensors; ++i) entries.push_back(read_entry(name, c, alignment));
  const uint64_t data = std::min<uint64_t>((c.place() + alignment - 1) / alignment * alignment, m.size);
  check_gguf_layout(name, entries, m.size - data);
  for (const GgufEntry& e : entries) {
    const std::byte* at = m.data + data + e.begin;
    const auto shape = shapes.find(e.name);
    const Dims dims = shape == shapes.end() ? e.dims : original_dims(name, e, shape->second);
    HostArray array;
    if (!e.type->plain)
      array = HostArray({DType::u8, {static_cast<int64_t>(e.bytes)}}, m.owner, at);
    else if (reinterpret_cast<uintptr_t>(at) % size_of(e.type->dtype) == 0)
      array = HostArray({e.type->dtype, dims}, m.owner, at);
    else {
      array = HostArray({e.type->dtype, dims});
      std::memcpy(array.mutable_data(), at, array.bytes());
    }
    bool fresh = out.tensors.emplace(e.name, array).second;
    if (!e.type->plain) {
      std::vector<int64_t> packing{e.type->id};
      packing.insert(packing.end(), dims.begin(), dims.end());
      fresh &=
          out.tensors.emplace(packing_of(e.name), HostArray::of<int64_t>({DType::s64, {std::ssize(packing)}}, packing))
              .second;
    }
    if (!fresh) refuse_gguf(name, fmt::format("the header names '{}' twice", e.name));
    for (const std::string& tensor : {e.name, packing_of(e.name)})
      if (out.tensors.contains(tensor)) out.offsets.emplace(tensor, data + e.begin);
  }
  return out;
}

}  // namespace md
